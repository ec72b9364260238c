"""SVG plots with logarithmic axes: panels below each other, a line of points for each series."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.view.quantity import memory
from weft.view.svg_elements import document_start, element, px, text_element, with_tooltip

WIDTH = 720
LEFT, RIGHT = 64, 140
PANEL_HEIGHT = 260
TITLE_HEIGHT = 30
AXIS_HEIGHT = 44
LINE_HEIGHT = 18
LABEL_GAP = 4
"""Px between two labels of the x axis."""
HALF_CHARACTER_WIDTH = 3.5
COLOURS = ("#1a73e8", "#d93025", "#188038", "#f29900", "#9334e6", "#12a4af", "#795548", "#5f6368")
GRID_COLOUR = "#dadce0"


@dataclass(frozen=True)
class Series:
    """Points (x, y), all above 0, in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One plot with its title, axes and curves."""

    title: str
    series: tuple[Series, ...]


@dataclass(frozen=True)
class LogAxis:
    """Values on a logarithmic axis, as positions in px."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """The position of a value."""
        length = self.end - self.start
        log_span = math.log(self.high / self.low) or 1.0
        log_distance = math.log(value / self.low)
        share = log_distance / log_span
        return self.start + share * length


def log_plot(panels: Sequence[Panel], *, title: str, x_label: str, y_label: str) -> str:
    """The panels as one SVG document; x in bytes, and the same axes for every panel."""
    x_values: set[float] = set()
    y_values: set[float] = set()
    for panel in panels:
        for series in panel.series:
            x_values.update(x for x, _ in series.points)
            y_values.update(y for _, y in series.points)
    x_axis = LogAxis(low=min(x_values), high=max(x_values), start=LEFT, end=WIDTH - RIGHT)
    height_of_panel = PANEL_HEIGHT + AXIS_HEIGHT + TITLE_HEIGHT
    height = TITLE_HEIGHT + len(panels) * height_of_panel
    parts = list(_heading(title, height))
    top = TITLE_HEIGHT
    for panel in panels:
        bottom = top + TITLE_HEIGHT + PANEL_HEIGHT
        y_axis = LogAxis(
            low=_power_of_ten_below(min(y_values)),
            high=_power_of_ten_above(max(y_values)),
            start=bottom,
            end=top + TITLE_HEIGHT,
        )
        parts.append(text_element(panel.title, x=LEFT, y=top + 20))
        parts.extend(_x_ticks(sorted(x_values), x_axis, y_axis, x_label))
        parts.extend(_y_ticks(y_axis, y_label))
        for number, series in enumerate(panel.series):
            colour = COLOURS[number % len(COLOURS)]
            parts.extend(_line(series, x_axis, y_axis, colour))
            line_y = y_axis.end + 10 + LINE_HEIGHT * number
            parts.extend(_legend(series.name, colour, line_y))
        top = bottom + AXIS_HEIGHT
    parts.append("</svg>")
    document = "\n".join(parts)
    return f"{document}\n"


def _power_of_ten_below(value: float) -> float:
    exponent = math.floor(math.log10(value))
    return 10.0**exponent


def _power_of_ten_above(value: float) -> float:
    """Above a value that is a power of ten itself there is room for its point."""
    exponent = math.ceil(math.log10(value * 1.0001))
    return 10.0**exponent


def _heading(title: str, height: int) -> Iterator[str]:
    yield document_start(WIDTH, height, font_family="sans-serif", font_size=12, fill="#202124")
    yield element("rect", width=WIDTH, height=height, fill="white")
    yield text_element(title, x=12, y=20, font_size=14, font_weight="bold")


def _x_ticks(values: Sequence[float], axis: LogAxis, y_axis: LogAxis, label: str) -> Iterator[str]:
    """A grid line at each value, labelled where there is room, and the label of the axis."""
    last_end = 0.0
    for value in values:
        x = axis.at(value)
        yield _rule(x, y_axis.end, x, y_axis.start)
        text = memory(value)
        half_width = HALF_CHARACTER_WIDTH * len(text)
        if x - half_width > last_end:
            last_end = x + half_width + LABEL_GAP
            yield text_element(text, x=px(x), y=px(y_axis.start + 16), text_anchor="middle")
    middle = (LEFT + WIDTH - RIGHT) / 2
    yield text_element(label, x=middle, y=px(y_axis.start + 34), text_anchor="middle")


def _y_ticks(axis: LogAxis, label: str) -> Iterator[str]:
    """A grid line at each power of ten, and the label of the axis."""
    lowest = round(math.log10(axis.low))
    highest = round(math.log10(axis.high))
    for exponent in range(lowest, highest + 1):
        value = 10.0**exponent
        y = axis.at(value)
        yield _rule(LEFT, y, WIDTH - RIGHT, y)
        yield text_element(f"{value:g}", x=LEFT - 6, y=px(y + 4), text_anchor="end")
    middle = (axis.start + axis.end) / 2
    yield text_element(
        label, transform=f"translate(16 {px(middle)}) rotate(-90)", text_anchor="middle"
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", x1=px(x1), y1=px(y1), x2=px(x2), y2=px(y2), stroke=GRID_COLOUR)


def _line(series: Series, x_axis: LogAxis, y_axis: LogAxis, colour: str) -> list[str]:
    """The line of a series, and a dot with a tooltip at each of its points."""
    corners = []
    dots = []
    for size, value in series.points:
        x = px(x_axis.at(size))
        y = px(y_axis.at(value))
        corners.append(f"{x},{y}")
        dot = element("circle", cx=x, cy=y, r=3, fill=colour)
        tooltip = f"{series.name}, {memory(size)}: {value:.4g}"
        dots.append(with_tooltip(dot, tooltip))
    line = element(
        "polyline", points=" ".join(corners), fill="none", stroke=colour, stroke_width=1.6
    )
    return [line, *dots]


def _legend(name: str, colour: str, y: float) -> Iterator[str]:
    x = WIDTH - RIGHT + 14
    yield element("rect", x=x, y=px(y - 5), width=14, height=4, fill=colour)
    yield text_element(name, x=x + 20, y=px(y + 1))
