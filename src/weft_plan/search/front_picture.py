"""SVG picture of what a search has found: time and memory of every layout, and the Pareto front of both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from weft.view.log_plot import LogAxis
from weft.view.memory_chart import FONT, GRID, INK, LABEL, PEAK
from weft.view.quantity import memory, short_time
from weft.view.svg_elements import document_start, element, px, text_element, with_tooltip
from weft_plan.search.found_layouts import Found, FoundLayouts, pareto_front
from weft_plan.search.layout_costs import Simulated

WIDTH, HEIGHT = 960, 460
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 64, 52
ROOM = 1.08
"""Range of an axis beyond its largest and smallest value, as a factor."""
STEPS = ((1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0), (1.0, 2.0, 5.0), (1.0,))
"""Round values of each power of ten, the finest first."""
MOST_TICKS = 10
NEAR = 4.0
"""Up to this multiple of the largest size the memory of a device is drawn."""
BEST, MEASURED = "#188038", "#1a73e8"
ROW = 15
"""Height of a label."""
CHARACTER = 6.4
"""Width of a character of a label."""
LABEL_SIZE = 11


def front_svg(result: FoundLayouts, capacity: float, *, title: str) -> str:
    """The layouts that were measured as dots, simulated ones as circles, and the Pareto front as a
    line: no layout of it is beaten in both time and memory.

    Args:
        result: with one measured layout at least.
        capacity: bytes of a device that layouts may fill.
    """
    entries: list[Found | Simulated] = [*result.best, *result.simulated_front]
    seconds = [entry.seconds for entry in entries]
    sizes = [entry.peak_bytes for entry in entries]
    x_axis = LogAxis(min(seconds) / ROOM, max(seconds) * ROOM, LEFT, WIDTH - RIGHT)
    is_near = capacity <= NEAR * max(sizes)
    most = max(*sizes, capacity) if is_near else max(sizes)
    y_axis = LogAxis(min(sizes) / ROOM, most * ROOM, HEIGHT - BOTTOM, TOP)
    front = pareto_front(entries)
    parts = [
        document_start(WIDTH, HEIGHT, font_family=FONT, font_size=12, fill=INK, role="img"),
        element("title", escape(title)),
        element("rect", width=WIDTH, height=HEIGHT, fill="white"),
        text_element(title, x=12, y=22, font_size=15, font_weight="bold", fill=INK),
        *_legend(),
        *_grid(x_axis, y_axis),
        *(_capacity(capacity, x_axis, y_axis) if is_near else ()),
        *_front_line(front, x_axis, y_axis),
        *(_dot(entry, entry is result.best[0], x_axis, y_axis) for entry in reversed(entries)),
        *_labels(front, x_axis, y_axis),
        "</svg>",
    ]
    return "\n".join([*parts, ""])


def _legend() -> Iterator[str]:
    x = LEFT
    for text, fill, stroke in (
        ("the best layout", BEST, BEST),
        ("measured", MEASURED, MEASURED),
        ("simulated", "none", MEASURED),
    ):
        yield element(
            "circle", cx=x, cy=42, r=4.5, fill=fill, stroke=stroke, stroke_width=1.5
        ) + text_element(text, x=x + 10, y=46, fill=LABEL)
        x += 30 + round(CHARACTER * len(text))
    yield element(
        "line", x1=x, y1=42, x2=x + 22, y2=42, stroke=MEASURED, stroke_width=1.5
    ) + text_element("Pareto front", x=x + 28, y=46, fill=LABEL)


def _grid(x_axis: LogAxis, y_axis: LogAxis) -> Iterator[str]:
    """Lines at round times and sizes, and what the axes are."""
    for value in _ticks(x_axis, 1.0):
        x = px(x_axis.at(value))
        yield element("line", x1=x, y1=TOP, x2=x, y2=HEIGHT - BOTTOM, stroke=GRID)
        yield text_element(
            short_time(value), x=x, y=HEIGHT - BOTTOM + 18, text_anchor="middle", fill=LABEL
        )
    for value in _ticks(y_axis, 1024.0**3 if y_axis.high >= 1024**3 else 1024.0**2):
        y = y_axis.at(value)
        yield element("line", x1=LEFT, y1=px(y), x2=WIDTH - RIGHT, y2=px(y), stroke=GRID)
        yield text_element(memory(value), x=LEFT - 8, y=px(y + 4), text_anchor="end", fill=LABEL)
    yield text_element(
        "time of a step",
        x=(LEFT + WIDTH - RIGHT) / 2,
        y=HEIGHT - 12,
        text_anchor="middle",
        fill=INK,
    )
    middle = (TOP + HEIGHT - BOTTOM) / 2
    yield text_element(
        "memory of the fullest rank",
        transform=f"translate(16 {px(middle)}) rotate(-90)",
        text_anchor="middle",
        fill=INK,
    )


def _ticks(axis: LogAxis, unit: float) -> list[float]:
    """Values between the ends that are round in this unit."""
    inside: list[float] = []
    for steps in STEPS:
        values = (unit * step * 10.0**power for power in range(-9, 7) for step in steps)
        inside = [value for value in values if axis.low <= value <= axis.high]
        if len(inside) <= MOST_TICKS:
            break
    return inside


def _capacity(capacity: float, x_axis: LogAxis, y_axis: LogAxis) -> Iterator[str]:
    """The memory that a layout may fill."""
    y = y_axis.at(capacity)
    yield element(
        "line",
        x1=x_axis.start,
        y1=px(y),
        x2=x_axis.end,
        y2=px(y),
        stroke=PEAK,
        stroke_dasharray="5 4",
    )
    yield text_element(
        f"{memory(capacity)} may be filled", x=x_axis.end, y=px(y - 5), text_anchor="end", fill=PEAK
    )


def _front_line(
    front: Sequence[Found | Simulated], x_axis: LogAxis, y_axis: LogAxis
) -> Iterator[str]:
    """Steps from each layout of the front to the next: what lies left of or below them does not
    exist.
    """
    corners: list[str] = []
    for entry in front:
        x, y = x_axis.at(entry.seconds), y_axis.at(entry.peak_bytes)
        if corners:
            corners.append(f"{px(x)},{corners[-1].split(',')[1]}")
        corners.append(f"{px(x)},{px(y)}")
    yield element(
        "polyline", points=" ".join(corners), fill="none", stroke=MEASURED, stroke_width=1.5
    )


def _dot(entry: Found | Simulated, is_best: bool, x_axis: LogAxis, y_axis: LogAxis) -> str:
    colour = BEST if is_best else MEASURED
    is_measured = isinstance(entry, Found)
    dot = element(
        "circle",
        cx=px(x_axis.at(entry.seconds)),
        cy=px(y_axis.at(entry.peak_bytes)),
        r=6 if is_best else 4.5,
        fill=colour if is_measured else "none",
        stroke=colour,
        stroke_width=1.5,
    )
    source = "measured" if is_measured else "simulated"
    figures = f"{short_time(entry.seconds)}, {memory(entry.peak_bytes)} ({source})"
    return with_tooltip(dot, f"{entry.layout.text}: {figures}")


def _labels(front: Sequence[Found | Simulated], x_axis: LogAxis, y_axis: LogAxis) -> Iterator[str]:
    """Names of the layouts of the front, right of their points or left of them, where there is
    room.
    """
    taken: list[tuple[float, float, float]] = []
    for entry in front:
        text = " ".join(word for word in entry.layout.text.split() if not word.startswith("split-"))
        width = CHARACTER * len(text)
        x, y = x_axis.at(entry.seconds), y_axis.at(entry.peak_bytes)
        is_left = x + 10 + width > x_axis.end
        start = x - 10 - width if is_left else x + 10
        is_free = start > x_axis.start and all(
            abs(y - other) >= ROW or start > right or start + width < left
            for left, right, other in taken
        )
        if is_free:
            taken.append((start, start + width, y))
            anchor = "end" if is_left else "start"
            place = px(x - 10 if is_left else x + 10)
            yield text_element(
                text, x=place, y=px(y - 4), text_anchor=anchor, font_size=LABEL_SIZE, fill=INK
            )
