"""SVG charts of a page of costs: memory over a step with its peak, and horizontal bars. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from weft.view.quantity import memory as memory_text

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
PEAK = "#d93025"


@dataclass(frozen=True)
class _Point:
    """The memory at one instruction of a row."""

    name: str
    held: int
    most: int


@dataclass(frozen=True)
class _ChartScale:
    """From instructions and bytes to px."""

    num_points: int
    top_bytes: float

    def x(self, index: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * index / max(1, self.num_points)

    def y(self, num_bytes: float) -> float:
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - num_bytes / self.top_bytes)


def memory_chart(role: Mapping[str, Any], *, limit_bytes: int | None) -> str:
    """What a rank holds over the instructions of a step, stacked, and its peak.

    Args:
        role: of the JSON of `weft explain`.
        limit_bytes: memory of the device.
    """
    points = _thinned([_Point(*level) for level in role["levels"]])
    peak = int(role["peak_bytes"])
    top = 1.08 * max(peak, limit_bytes if limit_bytes and limit_bytes < 2 * peak else 0, 1)
    scale = _ChartScale(len(points), top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        *_ticks(scale),
        *_bands(role, points, scale),
        *_legend(role),
        _peak_mark(points, scale, f"peak {memory_text(peak)} at {role['peak_at']}"),
    ]
    if limit_bytes and limit_bytes < top:
        y = scale.y(limit_bytes)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{PEAK}" stroke-dasharray="6 4"/>'
            f'<text x="{LEFT + 6}" y="{y - 5:.1f}" fill="{PEAK}">device: {memory_text(limit_bytes)}</text>'
        )
    parts.extend(_names(points, scale))
    return "\n".join((*parts, "</svg>"))


def _thinned(points: Sequence[_Point]) -> list[_Point]:
    """At most 800 points; each stands for several, with their largest figures."""
    size = -(-len(points) // MOST_POINTS)
    if size <= 1:
        return list(points)
    thinned = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        held = max(point.held for point in group)
        fullest = max(group, key=lambda point: point.most)
        thinned.append(_Point(fullest.name, held, fullest.most))
    return thinned


def _ticks(scale: _ChartScale) -> list[str]:
    """Horizontal lines at round sizes."""
    step = 1.0
    while scale.top_bytes / step > 6:
        step *= 2
    lines = []
    size = 0.0
    while size <= scale.top_bytes:
        y = scale.y(size)
        lines.append(
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ea"/>'
            f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#57606a">{memory_text(size)}</text>'
        )
        size += step
    return lines


def _bands(role: Mapping[str, Any], points: Sequence[_Point], scale: _ChartScale) -> list[str]:
    """Memory that is kept, as bands; above it what each instruction holds, and its workspace."""
    rectangles = []
    level = 0
    for kind in ("params", "gradients", "optimizer", "buffers"):
        size = int(role[f"{kind}_bytes"])
        if size:
            y, bottom = scale.y(level + size), scale.y(level)
            rectangles.append(
                f'<rect x="{LEFT}" y="{y:.1f}" width="{scale.x(len(points)) - LEFT:.1f}" height="{bottom - y:.1f}"'
                f' fill="{COLOURS[kind]}"/>'
            )
        level += size
    held = _steps([max(point.held, level) for point in points], scale)
    most = _steps([point.most for point in points], scale)
    base = scale.y(level)
    end = scale.x(len(points))
    colour = COLOURS["activations and messages"]
    area = f"M{LEFT},{base:.1f} L{held} L{end:.1f},{base:.1f} Z"
    return [
        *rectangles,
        f'<path d="{area}" fill="{colour}"/>',
        f'<path d="M{most}" fill="none" stroke="#1f2328" stroke-width="1.2"/>',
    ]


def _steps(sizes: Sequence[int], scale: _ChartScale) -> str:
    """A line with one horizontal piece for each instruction."""
    corners = []
    for index, size in enumerate(sizes):
        y = f"{scale.y(size):.1f}"
        corners.append(f"{scale.x(index):.1f},{y} {scale.x(index + 1):.1f},{y}")
    return " ".join(corners)


def _legend(role: Mapping[str, Any]) -> list[str]:
    names = [kind for kind in COLOURS if kind not in ("buffers",) or role["buffers_bytes"]]
    items = []
    x = float(LEFT)
    for name in names:
        items.append(
            f'<rect x="{x:.0f}" y="8" width="12" height="12" fill="{COLOURS[name]}"/>'
            f'<text x="{x + 17:.0f}" y="18">{name}</text>'
        )
        x += 34 + 6.6 * len(name)
    items.append(
        f'<line x1="{x:.0f}" x2="{x + 14:.0f}" y1="14" y2="14" stroke="#1f2328" stroke-width="1.5"/>'
        f'<text x="{x + 19:.0f}" y="18">most during each action</text>'
    )
    return items


def _peak_mark(points: Sequence[_Point], scale: _ChartScale, text: str) -> str:
    index = max(range(len(points)), key=lambda place: points[place].most)
    x, y = scale.x(index + 0.5), scale.y(points[index].most)
    is_right = x > WIDTH / 2
    anchor = "end" if is_right else "start"
    text_x = x - 9 if is_right else x + 9
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{PEAK}"/>'
        f'<text x="{text_x:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}" fill="{PEAK}" font-weight="600">{escape(text)}</text>'
    )


def _names(points: Sequence[_Point], scale: _ChartScale) -> list[str]:
    """Names of some instructions below the axis."""
    every = max(1, -(-len(points) // 14))
    names = []
    for index in range(0, len(points), every):
        x = scale.x(index + 0.5)
        names.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" fill="#57606a">'
            f"{escape(points[index].name)}</text>"
        )
    return names


def bars(sizes: Mapping[str, float], *, text: Callable[[float], str]) -> str:
    """Horizontal bars, each with its name and its size."""
    largest = max(sizes.values(), default=1) or 1
    height = BAR_HEIGHT * len(sizes) + 4
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">'
    ]
    room = WIDTH - BAR_LEFT - BAR_TEXT
    for index, (name, size) in enumerate(sizes.items()):
        y = BAR_HEIGHT * index + 2
        width = max(1.0, room * size / largest)
        lines.append(
            f'<text x="{BAR_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="{BAR_LEFT}" y="{y}" width="{width:.1f}" height="{BAR_HEIGHT - 5}" rx="2" fill="#7aa7e0"/>'
            f'<text x="{BAR_LEFT + width + 7:.1f}" y="{y + 14}" fill="#57606a">{escape(text(size))}</text>'
        )
    return "\n".join((*lines, "</svg>"))
