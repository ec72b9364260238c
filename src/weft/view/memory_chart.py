"""SVG charts of a page of costs: memory over a step with its peak, and horizontal bars. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.view.quantity import memory as memory_text
from weft.view.svg_elements import document_start, element, px, text_element

WIDTH = 960
HEIGHT = 280
LEFT = 76
RIGHT = 16
TOP = 34
BOTTOM = 36
MOST_POINTS = 800
BAR_HEIGHT = 22
BAR_LEFT = 190
BAR_TEXT = 90
COLOURS = {
    "params": "#9db8dc",
    "gradients": "#b7a6d9",
    "optimizer": "#d3d8de",
    "buffers": "#c9b79c",
    "activations and messages": "#7cc5a0",
}
KEPT_KINDS = ("params", "gradients", "optimizer", "buffers")
"""Memory that is held over the whole step, from the bottom of the chart."""
PEAK = "#d93025"
INK = "#1f2328"
GRID = "#e3e6ea"
LABEL = "#57606a"
BAR = "#7aa7e0"
FONT = "system-ui, sans-serif"
MOST_TICKS = 6
MOST_NAMES = 14
CHARACTER_WIDTH = 6.6
ROOM_ABOVE_PEAK = 1.08
"""Height of the chart as a multiple of the largest size in it."""


@dataclass(frozen=True)
class _Point:
    """The memory at one instruction of a row."""

    name: str
    held: int
    most: int


@dataclass(frozen=True)
class _ChartScale:
    """The scale from instructions and bytes to pixels."""

    num_points: int
    top_bytes: float

    @property
    def right(self) -> float:
        """The end of the last instruction."""
        return self.x(self.num_points)

    def x(self, index: float) -> float:
        width = WIDTH - LEFT - RIGHT
        return LEFT + width * index / max(1, self.num_points)

    def y(self, num_bytes: float) -> float:
        height = HEIGHT - TOP - BOTTOM
        share = num_bytes / self.top_bytes
        return TOP + height * (1 - share)


def memory_chart(role: Mapping[str, Any], *, limit_bytes: int | None) -> str:
    """What a rank holds over the instructions of a step, stacked, and its peak.

    Args:
        role: of the JSON of `weft explain`.
        limit_bytes: memory of the device.
    """
    points = [_Point(*level) for level in role["levels"]]
    points = _thinned(points)
    peak = int(role["peak_bytes"])
    largest = max(peak, 1)
    if limit_bytes and limit_bytes < 2 * peak:
        largest = max(largest, limit_bytes)
    scale = _ChartScale(num_points=len(points), top_bytes=ROOM_ABOVE_PEAK * largest)
    peak_text = f"peak {memory_text(peak)} at {role['peak_at']}"
    parts = [
        _chart_start(WIDTH, HEIGHT, font_size=12),
        *_ticks(scale),
        *_bands(role, scale),
        *_levels(role, points, scale),
        *_legend(role),
        _peak_mark(points, scale, peak_text),
    ]
    if limit_bytes and limit_bytes < scale.top_bytes:
        parts.append(_limit_mark(limit_bytes, scale))
    parts.extend(_names(points, scale))
    parts.append("</svg>")
    return "\n".join(parts)


def _chart_start(width: int, height: int, *, font_size: int) -> str:
    return document_start(width, height, font_family=FONT, font_size=font_size)


def _thinned(points: Sequence[_Point]) -> list[_Point]:
    """At most 800 points; each stands for several, with their largest figures."""
    size = _divided_up(len(points), MOST_POINTS)
    if size <= 1:
        return list(points)
    thinned = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        fullest = max(group, key=_most_of)
        summary = _Point(
            name=fullest.name, held=max(point.held for point in group), most=fullest.most
        )
        thinned.append(summary)
    return thinned


def _most_of(point: _Point) -> int:
    return point.most


def _divided_up(number: int, divisor: int) -> int:
    return -(-number // divisor)


def _ticks(scale: _ChartScale) -> Iterator[str]:
    """Horizontal lines at round sizes."""
    step = 1.0
    while scale.top_bytes / step > MOST_TICKS:
        step *= 2
    size = 0.0
    while size <= scale.top_bytes:
        y = scale.y(size)
        rule = element("line", x1=LEFT, x2=WIDTH - RIGHT, y1=px(y), y2=px(y), stroke=GRID)
        label = text_element(
            memory_text(size), x=LEFT - 8, y=px(y + 4), text_anchor="end", fill=LABEL
        )
        yield rule + label
        size += step


def _bands(role: Mapping[str, Any], scale: _ChartScale) -> Iterator[str]:
    """Memory that is kept over the whole step, as bands on each other."""
    level = 0
    for kind in KEPT_KINDS:
        size = int(role[f"{kind}_bytes"])
        bottom = scale.y(level)
        level += size
        y = scale.y(level)
        if size:
            yield element(
                "rect",
                x=LEFT,
                y=px(y),
                width=px(scale.right - LEFT),
                height=px(bottom - y),
                fill=COLOURS[kind],
            )


def _levels(role: Mapping[str, Any], points: Sequence[_Point], scale: _ChartScale) -> Iterator[str]:
    """Above the bands: what each instruction holds, as an area, and most during it, as a line."""
    kept = sum(int(role[f"{kind}_bytes"]) for kind in KEPT_KINDS)
    base = px(scale.y(kept))
    held = _steps([max(point.held, kept) for point in points], scale)
    yield element(
        "path",
        d=f"M{LEFT},{base} L{held} L{px(scale.right)},{base} Z",
        fill=COLOURS["activations and messages"],
    )
    most = _steps([point.most for point in points], scale)
    yield element("path", d=f"M{most}", fill="none", stroke=INK, stroke_width=1.2)


def _steps(sizes: Sequence[int], scale: _ChartScale) -> str:
    """A line with one horizontal piece for each instruction."""
    corners = []
    for index, size in enumerate(sizes):
        left = px(scale.x(index))
        right = px(scale.x(index + 1))
        y = px(scale.y(size))
        corners.append(f"{left},{y} {right},{y}")
    return " ".join(corners)


def _legend(role: Mapping[str, Any]) -> list[str]:
    items = []
    x = float(LEFT)
    for name, colour in COLOURS.items():
        if name == "buffers" and not role["buffers_bytes"]:
            continue
        square = element("rect", x=f"{x:.0f}", y=8, width=12, height=12, fill=colour)
        label = text_element(name, x=f"{x + 17:.0f}", y=18)
        items.append(square + label)
        x += 34 + CHARACTER_WIDTH * len(name)
    stroke = element(
        "line", x1=f"{x:.0f}", x2=f"{x + 14:.0f}", y1=14, y2=14, stroke=INK, stroke_width=1.5
    )
    label = text_element("most during each action", x=f"{x + 19:.0f}", y=18)
    items.append(stroke + label)
    return items


def _peak_mark(points: Sequence[_Point], scale: _ChartScale, text: str) -> str:
    """A dot at the fullest instruction, and a text on the side where there is room."""
    sizes = [point.most for point in points]
    peak = max(sizes)
    x = scale.x(sizes.index(peak) + 0.5)
    y = scale.y(peak)
    dot = element("circle", cx=px(x), cy=px(y), r=4.5, fill=PEAK)
    is_right = x > WIDTH / 2
    label = text_element(
        text,
        x=px(x - 9 if is_right else x + 9),
        y=px(y - 8),
        text_anchor="end" if is_right else "start",
        fill=PEAK,
        font_weight=600,
    )
    return dot + label


def _limit_mark(limit_bytes: int, scale: _ChartScale) -> str:
    """A dashed line at the memory of the device."""
    y = scale.y(limit_bytes)
    rule = element(
        "line", x1=LEFT, x2=WIDTH - RIGHT, y1=px(y), y2=px(y), stroke=PEAK, stroke_dasharray="6 4"
    )
    label = text_element(f"device: {memory_text(limit_bytes)}", x=LEFT + 6, y=px(y - 5), fill=PEAK)
    return rule + label


def _names(points: Sequence[_Point], scale: _ChartScale) -> Iterator[str]:
    """Names of some instructions below the axis."""
    every = max(1, _divided_up(len(points), MOST_NAMES))
    for index in range(0, len(points), every):
        x = scale.x(index + 0.5)
        yield text_element(
            points[index].name, x=px(x), y=HEIGHT - BOTTOM + 18, text_anchor="middle", fill=LABEL
        )


def bars(sizes: Mapping[str, float], *, text: Callable[[float], str]) -> str:
    """Horizontal bars, each with its name and its size."""
    height = BAR_HEIGHT * len(sizes) + 4
    largest = max(sizes.values(), default=1) or 1
    room = WIDTH - BAR_LEFT - BAR_TEXT
    lines = [_chart_start(WIDTH, height, font_size=13)]
    top = 2
    for name, size in sizes.items():
        width = max(1.0, room * size / largest)
        bar = _bar(name, text(size), top=top, width=width)
        lines.append(bar)
        top += BAR_HEIGHT
    lines.append("</svg>")
    return "\n".join(lines)


def _bar(name: str, size: str, *, top: int, width: float) -> str:
    baseline = top + 14
    name_label = text_element(name, x=BAR_LEFT - 8, y=baseline, text_anchor="end")
    bar = element("rect", x=BAR_LEFT, y=top, width=px(width), height=BAR_HEIGHT - 5, rx=2, fill=BAR)
    size_label = text_element(size, x=px(BAR_LEFT + width + 7), y=baseline, fill=LABEL)
    return name_label + bar + size_label
