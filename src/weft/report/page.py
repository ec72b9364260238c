"""The report as one self-contained HTML page: nothing is fetched, and of scripts only its own may run.

A content security policy names the digests of the scripts, so that a script in a recorded text could not run even if
it were not escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from weft import __version__
from weft.config.run_files import different_keys
from weft.errors import printable
from weft.report.charts import Chart, ChartSeries, charts
from weft.report.figures import (
    answers,
    config_rows,
    final_figures,
    measured_memory_text,
    stage_memory,
)
from weft.report.heat_map import expert_heat_map
from weft.report.mesh_picture import mesh_picture
from weft.report.recorded_values import Mark, RunRecord
from weft.report.svg_charts import COLOURS, DARK, PALETTE, chart_svg, style

if TYPE_CHECKING:
    from jinja2 import Template

SCRIPTS = ("uplot.js", "charts.js")
LIVE_SCRIPTS = (*SCRIPTS, "live.js")
MOST_MARKS = 300
"""Events of a run that the table lists, the newest."""
MOST_LINES = 3
"""Lines across a chart of one kind of event and run, the newest."""
MOST_TEXTS = 20
MOST_TEXT_CHARS = 20_000
NUM_PLACES = 400
"""Steps at which tokens and hours are known; between them they are interpolated."""


@dataclass(frozen=True)
class LiveSource:
    """What a live page needs to stay up to date.

    Attributes:
        stream: address of its server-sent events.
        version: what they said when the page was made.
        reload_s: after so long a browser without scripts loads the page again.
    """

    stream: str
    version: str
    reload_s: int = 10


def report_page(
    runs: Sequence[RunRecord], others: Sequence[RunRecord] = (), *, live: LiveSource | None = None
) -> str:
    """The page of one run, or of several over each other.

    Args:
        others: runs that stand in the tables of figures and of keys alone.
        live: of a page that a server keeps up to date; None: the page is a file, which fetches
            nothing.
    """
    found = charts(runs)
    tabled = [*runs, *others]
    configs = [dict(run.config) for run in tabled]
    scripts = list(map(script_file, LIVE_SCRIPTS if live else SCRIPTS))
    return page_template("page.html").render(
        title=" · ".join(printable(run.name) for run in runs),
        csp=policy(scripts, live=live is not None),
        css=page_css(),
        live=live,
        scripts=scripts,
        data=_data(runs, found),
        runs=runs,
        tabled=tabled,
        charts=[(chart, chart_svg(chart, marks=_across(runs))) for chart in found],
        answers=[(run, answers(run)) for run in runs],
        figures=_by_name([final_figures(run) for run in tabled]),
        heat_maps=[(run, expert_heat_map(run)) for run in runs],
        stages=[(run, stage_memory(run), measured_memory_text(run)) for run in runs],
        differing=list(config_rows(tabled, different_keys(configs))),
        config=list(
            config_rows(tabled, list(dict.fromkeys(key for each in configs for key in each)))
        ),
        layouts=[(run, mesh_picture(str(run.start.get("layout", "")))) for run in runs],
        marks=[(run, list(reversed(run.marks))[:MOST_MARKS]) for run in runs],
        samples=[(run, list(run.samples)[-MOST_TEXTS:]) for run in runs],
        left_out=_left_out(found),
        num_colours=len(COLOURS),
        version=__version__,
    )


def page_template(name: str) -> Template:
    """A template of this package: every text is escaped, and the filter `lines` writes out its control
    characters.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # late: 60 ms to import

    environment = Environment(
        loader=PackageLoader("weft.report", "."), autoescape=True, undefined=StrictUndefined
    )
    environment.filters["lines"] = _lines
    return environment.get_template(name)


def policy(scripts: Sequence[str], *, live: bool) -> str:
    """The content security policy of a page: these scripts may run, and a live page may read its
    server.
    """
    sources = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policies = ["default-src 'none'", "style-src 'unsafe-inline'", f"script-src {sources}"]
    own = "'self'" if live else "'none'"
    if live:
        policies.append(f"connect-src {own}")
    return "; ".join([*policies, "base-uri 'none'", f"form-action {own}"])


def live_policy() -> str:
    """The policy of the server of live pages: their scripts, of which each page allows its own."""
    return policy(list(map(script_file, LIVE_SCRIPTS)), live=True)


def script_file(name: str) -> str:
    """A script or style sheet of this package."""
    return resources.files("weft.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _lines(text: object) -> str:
    """A text with control characters, but line ends and tabs, written out."""
    shortened = str(text)[:MOST_TEXT_CHARS].expandtabs(4)
    return "\n".join(map(printable, shortened.split("\n")))


def page_css() -> str:
    """The style of pages, in light and dark."""
    light = "".join(f"--{name}:{value};" for name, value in PALETTE.items())
    dark = "".join(f"--{name}:{value};" for name, value in DARK.items())
    media = f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    return "\n".join(
        [
            f":root {{ {light} }}",
            media,
            style({name: f"var(--{name})" for name in PALETTE}),
            script_file("uplot.css"),
            script_file("page.css"),
        ]
    )


def _by_name(figures: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """A row for each figure that some run has."""
    rows = [(name, [each[name] for each in figures]) for name in figures[0]]
    return [(name, values) for name, values in rows if set(values) - {"-"}]


def _across(runs: Sequence[RunRecord]) -> list[Mark]:
    """The marks of a single run, which are drawn across its charts."""
    return list(_newest(runs[0].marks)) if len(runs) == 1 else []


def _newest(marks: Sequence[Mark]) -> Iterator[Mark]:
    """Of each kind the newest ones, so that a chart stays readable."""
    seen: dict[str, int] = {}
    for mark in reversed(marks):
        seen[mark.kind] = seen.get(mark.kind, 0) + 1
        if seen[mark.kind] <= MOST_LINES * 10:
            yield mark


def _left_out(found: Sequence[Chart]) -> list[str]:
    """What downsampling has left out: `1,000 of 100,000 points of loss`."""
    texts = []
    for chart in found:
        for series in chart.series:
            if not series.curve.is_whole:
                shown = f"{len(series.curve.x):,} of {series.curve.total:,}"
                texts.append(f"{printable(series.label)} ({chart.title.lower()}): {shown} points")
    return texts


def _data(runs: Sequence[RunRecord], found: Sequence[Chart]) -> str:
    """What the script of the page reads, as JSON that holds no markup."""
    fields = {
        "runs": [{"name": printable(run.name), "x": _places(run)} for run in runs],
        "charts": [_chart_fields(chart) for chart in found],
        "marks": [
            {"run": index, "step": mark.step, "kind": mark.kind, "text": _lines(mark.text)[:200]}
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
