"""SVG plots with logarithmic axes: panels below each other, a line of points for each series."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.view.quantity import memory

WIDTH = 720
LEFT, RIGHT = 64, 140
PANEL_HEIGHT = 260
TITLE_HEIGHT = 30
AXIS_HEIGHT = 44
LINE_HEIGHT = 18
COLOURS = ("#1a73e8", "#d93025", "#188038", "#f29900", "#9334e6", "#12a4af", "#795548", "#5f6368")


@dataclass(frozen=True)
class Series:
    """Points (x, y), all above 0, in order of x."""

    name: str
    points: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Panel:
    """One plot."""

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
        span = math.log(self.high / self.low) or 1.0
        return self.start + math.log(value / self.low) / span * (self.end - self.start)


def log_plot(panels: Sequence[Panel], *, title: str, x_label: str, y_label: str) -> str:
    """The panels as one SVG document; x in bytes, and the same axes for every panel."""
    x_values = [x for panel in panels for series in panel.series for x, _ in series.points]
    y_values = [y for panel in panels for series in panel.series for _, y in series.points]
    x_axis = LogAxis(min(x_values), max(x_values), LEFT, WIDTH - RIGHT)
    low = 10 ** math.floor(math.log10(min(y_values)))
    high = 10 ** math.ceil(math.log10(max(y_values) * 1.0001))
    height = TITLE_HEIGHT + len(panels) * (PANEL_HEIGHT + AXIS_HEIGHT + TITLE_HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#202124">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">{escape(title)}</text>',
    ]
    top = TITLE_HEIGHT
    for panel in panels:
        bottom = top + TITLE_HEIGHT + PANEL_HEIGHT
        y_axis = LogAxis(low, high, bottom, top + TITLE_HEIGHT)
        parts.append(f'<text x="{LEFT}" y="{top + 20}">{escape(panel.title)}</text>')
        parts.extend(_x_ticks(sorted(set(x_values)), x_axis, y_axis, x_label))
        parts.extend(_y_ticks(y_axis, y_label))
        for number, series in enumerate(panel.series):
            parts.extend(_line(series, x_axis, y_axis, COLOURS[number % len(COLOURS)]))
            parts.extend(_legend(series.name, number, y_axis))
        top = bottom + AXIS_HEIGHT
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _x_ticks(values: Sequence[float], axis: LogAxis, y_axis: LogAxis, label: str) -> list[str]:
    parts = []
    last_end = 0.0
    for value in values:
        x = axis.at(value)
        parts.append(_rule(x, y_axis.end, x, y_axis.start))
        text = memory(value)
        half_width = 3.5 * len(text)
        if x - half_width > last_end:
            last_end = x + half_width + 4
            parts.append(
                f'<text x="{x:.1f}" y="{y_axis.start + 16:.1f}" text-anchor="middle">{text}</text>'
            )
    middle = (LEFT + WIDTH - RIGHT) / 2
    place = f'x="{middle}" y="{y_axis.start + 34:.1f}" text-anchor="middle"'
    parts.append(f"<text {place}>{escape(label)}</text>")
    return parts


def _y_ticks(axis: LogAxis, label: str) -> list[str]:
    parts = []
    for exponent in range(round(math.log10(axis.low)), round(math.log10(axis.high)) + 1):
        y = axis.at(10.0**exponent)
        parts.append(_rule(LEFT, y, WIDTH - RIGHT, y))
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**exponent:g}</text>'
        )
    middle = (axis.start + axis.end) / 2
    place = f'transform="translate(16 {middle:.1f}) rotate(-90)" text-anchor="middle"'
    parts.append(f"<text {place}>{escape(label)}</text>")
    return parts


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="#dadce0"/>'


def _line(series: Series, x_axis: LogAxis, y_axis: LogAxis, colour: str) -> list[str]:
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in series.points]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>']
    for (x, y), (size, value) in zip(places, series.points, strict=True):
        tooltip = escape(f"{series.name}, {memory(size)}: {value:.4g}")
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        parts.append(f"<g><title>{tooltip}</title>{dot}</g>")
    return parts


def _legend(name: str, number: int, y_axis: LogAxis) -> list[str]:
    x = WIDTH - RIGHT + 14
    y = y_axis.end + 10 + LINE_HEIGHT * number
    colour = COLOURS[number % len(COLOURS)]
    return [
        f'<rect x="{x}" y="{y - 5:.1f}" width="14" height="4" fill="{colour}"/>',
        f'<text x="{x + 20}" y="{y + 1:.1f}">{escape(name)}</text>',
    ]
