"""Charts as static SVG: shown where scripts are off, and exported as one picture."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from weft.report.charts import Chart, ChartSeries
from weft.report.downsample import downsampled
from weft.report.recorded_values import Mark
from weft.view.quantity import count
from weft.view.svg_elements import document_start, element, px, text_element

WIDTH, HEIGHT = 720, 260
PAGE_WIDTH = 480
"""Of a chart of the page, whose text is readable on a phone."""
LEFT, RIGHT, TOP, BOTTOM = 64, 14, 34, 30
MOST_POINTS = 600
MOST_TICKS = 5
CHARACTER_PX = 7.1
"""Width of a character of a label, at most on average."""
ROW_PX = 20
"""Height of a row of a legend above the charts."""
LEGEND_PX = 30
"""Width of an entry of a legend beside its name."""
QUIET_MARKS = ("save", "note")
"""Kinds without a line across the chart."""
LEAST_DECIMAL = 0.01
"""Smaller powers of ten have an exponent."""
DASHES = "6 4"
COLOURS = ("#2563eb", "#d9480f", "#15803d", "#9333ea", "#0e7490", "#be123c", "#a16207", "#475569")
PALETTE = {
    "bg": "#ffffff",
    "ink": "#1f2328",
    "dim": "#57606a",
    "rule": "#e3e6ea",
    "mark": "#b42318",
    "card": "#f6f8fa",
    **{f"s{index}": colour for index, colour in enumerate(COLOURS)},
}
"""Name of a colour -> its value; the page has the same names as CSS variables."""
DARK = {
    "bg": "#0d1117",
    "ink": "#e6edf3",
    "dim": "#9198a1",
    "rule": "#2a313a",
    "mark": "#ff7b72",
    "card": "#161b22",
    **{
        f"s{index}": colour
        for index, colour in enumerate(
            ("#6ea8fe", "#ff9b5e", "#56d364", "#c297ff", "#39c5cf", "#ff7ba1", "#e3b341", "#a5b0bd")
        )
    },
}
"""The same where the reader prefers dark colours."""


def style(colours: Mapping[str, str]) -> str:
    """CSS of the classes of a chart, with these values of its colours."""
    lines = [
        f".bg{{fill:{colours['bg']}}} .ink{{fill:{colours['ink']}}} .dim{{fill:{colours['dim']}}}",
        f".rule{{stroke:{colours['rule']}}} .mark{{stroke:{colours['mark']};stroke-dasharray:4 3}}",
    ]
    for index in range(len(COLOURS)):
        colour = colours[f"s{index}"]
        lines.append(f".s{index}{{stroke:{colour};fill:none}} .f{index}{{fill:{colour}}}")
    return "\n".join(lines)


def style_of_picture() -> str:
    """The style of an exported picture, in light and dark."""
    return f"{style(PALETTE)}\n@media (prefers-color-scheme: dark) {{\n{style(DARK)}\n}}"


@dataclass(frozen=True)
class Axis:
    """Values along an axis, as positions in px.

    Attributes:
        low, high: its ends; of a logarithmic axis their logarithms to base 10, whole numbers.
    """

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    @staticmethod
    def over(values: Sequence[float], *, start: float, end: float, room: float = 0.0) -> Axis:
        """An axis that holds the values, with a share of room on both sides."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        margin = (high - low or abs(high) or 1.0) * room
        return Axis(low - margin, high + margin, start, end)

    @staticmethod
    def of_decades(values: Sequence[float], *, start: float, end: float) -> Axis:
        """A logarithmic axis that holds the values, which are above 0, between powers of ten."""
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        return Axis(low, max(high, low + 1), start, end, is_log=True)

    def at(self, value: float) -> float:
        """The position of a value."""
        value = math.log10(value) if self.is_log else value
        return self.start + (value - self.low) / ((self.high - self.low) or 1.0) * (
            self.end - self.start
        )

    def ticks(self, *, least: float = 0.0) -> Iterator[float]:
        """Round values, at least so far apart; powers of ten on a logarithmic axis."""
        if self.is_log:
            every = math.ceil((self.high - self.low) / MOST_TICKS)
            yield from (10.0**power for power in range(int(self.low), int(self.high) + 1, every))
            return
        span = self.high - self.low or 1.0
        size = 10.0 ** math.floor(math.log10(span))
        step = next(f * size for f in (0.1, 0.2, 0.5, 1, 2, 5) if span / (f * size) <= MOST_TICKS)
        step = max(step, least)
        first = math.ceil(self.low / step)
        for index in range(first, math.floor(self.high / step) + 1):
            yield index * step


def picture(charts: Sequence[Chart], *, names: Sequence[str], marks: Sequence[Mark] = ()) -> str:
    """All charts below each other, as one document.

    Args:
        names: of the runs; several stand beside their colours above the charts.
    """
    heading, top = _heading(names)
    height = HEIGHT * len(charts) + top
    parts = [
        document_start(WIDTH, height, font_family="DejaVu Sans, sans-serif", font_size=12),
        f"<style>{style_of_picture()}</style>",
        element("rect", width=WIDTH, height=height, **{"class": "bg"}),
        *heading,
    ]
    for index, chart in enumerate(charts):
        lines = _elements(chart, marks, width=WIDTH, has_legend=len(names) == 1)
        content = "\n".join(lines)
        parts.append(element("g", content, transform=f"translate(0 {top + index * HEIGHT})"))
    return "\n".join([*parts, "</svg>", ""])


def _heading(names: Sequence[str]) -> tuple[list[str], int]:
    """The name of a run, or those of several in their colours, in rows; and the height of all that."""
    if len(names) == 1:
        title = text_element(
            names[0], x=12, y=26, font_size=16, font_weight="bold", **{"class": "ink"}
        )
        return [title], 40
    parts: list[str] = []
    x, y = float(LEFT), 24
    for index, name in enumerate(names):
        width = CHARACTER_PX * len(name) + LEGEND_PX
        if x > LEFT and x + width > WIDTH - RIGHT:
            x, y = float(LEFT), y + ROW_PX
        dot = {"class": f"f{index % len(COLOURS)}"}
        parts.append(element("rect", x=px(x), y=y - 9, width=10, height=10, rx=2, **dot))
        parts.append(text_element(name, x=px(x + 16), y=y, **{"class": "ink"}))
        x += width
    return parts, y + ROW_PX


def chart_svg(chart: Chart, *, marks: Sequence[Mark] = ()) -> str:
    """One chart; its colours are those of the page."""
    start = document_start(
        PAGE_WIDTH, HEIGHT, font_family="system-ui, sans-serif", font_size=12, role="img"
    )
    title = element("title", _escaped(chart.title))
    return "\n".join([start, title, *_elements(chart, marks, width=PAGE_WIDTH), "</svg>"])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


def _elements(
    chart: Chart, marks: Sequence[Mark], *, width: int, has_legend: bool = True
) -> Iterator[str]:
    x_axis = Axis.over(
        [float(x) for series in chart.series for x in series.curve.x[[0, -1]]],
        start=LEFT,
        end=width - RIGHT,
    )
    values = np.concatenate([series.curve.y for series in chart.series])
    ends = (float(values.min()), float(values.max()))
    y_axis = Axis.over(ends, start=HEIGHT - BOTTOM, end=TOP, room=0.05)
    if chart.is_log:
        y_axis = Axis.of_decades(ends, start=HEIGHT - BOTTOM, end=TOP)
    heading = f"{chart.title}, {chart.unit}" if chart.unit else chart.title
    if _shares_colours(chart.series):
        heading += "; points are evaluations"
    yield text_element(heading, x=LEFT, y=16, font_weight="bold", **{"class": "ink"})
    yield from _grid(x_axis, y_axis)
    for mark in marks:
        if mark.kind not in QUIET_MARKS and x_axis.low <= mark.step <= x_axis.high:
            x = px(x_axis.at(mark.step))
            yield element("line", x1=x, x2=x, y1=TOP, y2=HEIGHT - BOTTOM, **{"class": "mark"})
    for series in chart.series:
        yield _curve(series, x_axis, y_axis)
    if has_legend:
        yield from _legend(
            chart.series, start=LEFT + CHARACTER_PX * len(heading), end=width - RIGHT
        )


def _shares_colours(series: Sequence[ChartSeries]) -> bool:
    """Whether points have the colours of curves: those of several runs do."""
    curves = {each.colour for each in series if each.style != "points"}
    return any(each.style == "points" and each.colour in curves for each in series)


def _grid(x_axis: Axis, y_axis: Axis) -> Iterator[str]:
    for value in y_axis.ticks():
        y = px(y_axis.at(value))
        yield element("line", x1=LEFT, x2=px(x_axis.end), y1=y, y2=y, **{"class": "rule"})
        label = count(value) if abs(value) >= 1000 else f"{value:.4g}"
        if y_axis.is_log and value < LEAST_DECIMAL:
            label = f"{value:.0e}"
        yield text_element(
            label, x=LEFT - 7, y=px(y_axis.at(value) + 4), text_anchor="end", **{"class": "dim"}
        )
    for value in x_axis.ticks(least=1):  # steps are whole numbers
        x = px(x_axis.at(value))
        yield text_element(
            count(value), x=x, y=HEIGHT - BOTTOM + 18, text_anchor="middle", **{"class": "dim"}
        )


def _curve(series: ChartSeries, x_axis: Axis, y_axis: Axis) -> str:
    kept = downsampled(series.curve.x, series.curve.y, most=MOST_POINTS)
    points = [(px(x_axis.at(x)), px(y_axis.at(y))) for x, y in zip(kept.x, kept.y, strict=True)]
    colour = series.colour % len(COLOURS)
    if series.style == "points" or len(points) == 1:
        dots = [element("circle", cx=x, cy=y, r=3.5, **{"class": f"f{colour}"}) for x, y in points]
        return "".join(dots)
    corners = " ".join(f"{x},{y}" for x, y in points)
    dashes = {"stroke_dasharray": DASHES} if series.style == "dashes" else {}
    return element(
        "polyline", points=corners, stroke_width=1.5, **dashes, **{"class": f"s{colour}"}
    )


def _legend(series: Sequence[ChartSeries], *, start: float, end: float) -> Iterator[str]:
    """The names of several curves, as many as there is room for from `start` to `end`; points have
    the colour of the curve of their run.
    """
    named = [each for each in series if each.style != "points" or not _shares_colours(series)]
    if len(named) == 1:
        return
    labels = [each.label if len(each.label) <= 24 else f"{each.label[:23]}…" for each in named]
    widths = [CHARACTER_PX * len(label) + LEGEND_PX for label in labels]
    room = end - start
    num_shown = sum(width <= room for width in itertools.accumulate(widths))
    x = end
    if num_shown < len(named):
        rest = f"and {len(named) - num_shown} more"
        is_full = sum(widths[:num_shown]) + CHARACTER_PX * len(rest) > room
        num_shown = max(0, num_shown - is_full)
        rest = f"and {len(named) - num_shown} more"
        yield text_element(rest, x=px(x), y=16, text_anchor="end", **{"class": "dim"})
        x -= CHARACTER_PX * len(rest) + 14
    shown = list(zip(named, labels, strict=True))[:num_shown]
    for each, label in reversed(shown):
        yield text_element(label, x=px(x), y=16, text_anchor="end", **{"class": "dim"})
        x -= CHARACTER_PX * len(label) + 16
        yield element(
            "rect",
            x=px(x),
            y=8,
            width=10,
            height=8,
            rx=2,
            **{"class": f"f{each.colour % len(COLOURS)}"},
        )
        x -= 14
