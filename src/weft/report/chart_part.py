"""Charts as a part of a page: markup, style, data and scripts, which the report and the page of a trace share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft.errors import printable
from weft.report.charts import Chart, ChartSeries
from weft.report.recorded_values import Mark, RunRecord
from weft.report.svg_charts import COLOURS, DARK, PALETTE, chart_svg, style
from weft.view.html import ScriptedPart

if TYPE_CHECKING:
    from jinja2 import Template

SCRIPTS = ("uplot.js", "charts.js")
MOST_LINES = 3
"""Lines across a chart of one kind of event and run, the newest."""
MOST_TEXT_CHARS = 20_000
NUM_PLACES = 400
"""Steps at which tokens and hours are known; between them they are interpolated."""


def chart_part(runs: Sequence[RunRecord], charts: Sequence[Chart], *, title: str) -> ScriptedPart:
    """The charts as a part of a page that is no report."""
    curves = page_template("curves.html")
    return ScriptedPart(
        html=f"<h2>{escape(title)}</h2>{curves.render(runs=runs, charts=drawn_charts(runs, charts))}",
        css=chart_css(),
        data=chart_data(runs, charts),
        scripts=tuple(map(text_file, SCRIPTS)),
    )


def drawn_charts(runs: Sequence[RunRecord], charts: Sequence[Chart]) -> list[tuple[Chart, str]]:
    """Each chart with its static picture, across which the marks of a single run are drawn."""
    marks = list(_newest(runs[0].marks)) if len(runs) == 1 else []
    return [(chart, chart_svg(chart, marks=marks)) for chart in charts]


def page_template(name: str) -> Template:
    """A template of this package: every text is escaped, and the filter `lines` writes out its control
    characters.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # late: 60 ms to import

    environment = Environment(
        loader=PackageLoader("weft.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["lines"] = escaped_lines
    return environment.get_template(name)


def text_file(name: str) -> str:
    """A script or style sheet of this package."""
    return resources.files("weft.report").joinpath(name).read_text(encoding="utf-8")


def escaped_lines(text: object) -> str:
    """A text with control characters, but line ends and tabs, written out."""
    shortened = str(text)[:MOST_TEXT_CHARS].expandtabs(4)
    return "\n".join(map(printable, shortened.split("\n")))


def chart_css() -> str:
    """The colours and the style of charts, in light and dark."""
    light = "".join(f"--{name}:{value};" for name, value in PALETTE.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    media = f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return "\n".join(
        [
            f":root {{ {light} }}",
            media,
            style({name: f"var(--{name})" for name in PALETTE}),
            text_file("uplot.css"),
            text_file("charts.css"),
        ]
    )


def _newest(marks: Sequence[Mark]) -> Iterator[Mark]:
    """Of each kind the newest ones, so that a chart stays readable."""
    seen: dict[str, int] = {}
    for mark in reversed(marks):
        seen[mark.kind] = seen.get(mark.kind, 0) + 1
        if seen[mark.kind] <= MOST_LINES * 10:
            yield mark


def chart_data(runs: Sequence[RunRecord], charts: Sequence[Chart]) -> str:
    """What the script of the charts reads, as JSON that holds no markup."""
    fields = {
        "runs": [{"name": printable(run.name), "x": _places(run)} for run in runs],
        "charts": [_chart_fields(chart) for chart in charts],
        "marks": [
            {
                "run": index,
                "step": mark.step,
                "kind": mark.kind,
                "text": escaped_lines(mark.text)[:200],
            }
            for index, run in enumerate(runs)
            for mark in _newest(run.marks)
        ],
    }
    text = json.dumps(fields, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _places(run: RunRecord) -> dict[str, list[float]]:
    """Steps, with the tokens and the hours of training up to each."""
    kept = np.unique(
        np.linspace(0, len(run.steps) - 1, min(len(run.steps), NUM_PLACES)).astype(int)
    )
    columns = {"step": run.steps, "tokens": run.trained_tokens, "hours": run.hours}
    return {name: _rounded(values[kept]) for name, values in columns.items()}


def _chart_fields(chart: Chart) -> dict[str, Any]:
    return {
        "key": chart.key,
        "title": chart.title,
        "unit": chart.unit,
        "log": chart.is_log,
        "series": [_series_fields(series) for series in chart.series],
    }


def _series_fields(series: ChartSeries) -> dict[str, Any]:
    curve = series.curve
    fields = {
        "label": printable(series.label),
        "run": series.run,
        "colour": series.colour % len(COLOURS),
        "style": series.style,
        "x": _rounded(curve.x),
        "y": _rounded(curve.y),
    }
    if not curve.is_whole:
        fields |= {"mx": _rounded(curve.mean_x), "my": _rounded(curve.mean_y)}
    return fields


def _rounded(values: NDArray[Any]) -> list[float]:
    """Round values to seven significant digits."""
    rounded = (float(f"{value:.7g}") for value in values.tolist())
    return [int(value) if value == int(value) else value for value in rounded]
