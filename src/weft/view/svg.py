"""SVG picture of a timeline, or of several on one time scale: a row for each rank, a box for each action, a time axis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.schedule.timeline import COMPUTE, KERNELS, Span, Timeline, lanes_of, makespan
from weft.view.svg_elements import document_start, element, text_element, with_tooltip
from weft.view.text import action_labels, figures, legend, wrapped

COLOURS = {
    "F": "#8ab4f8",
    "B": "#81c995",
    "I": "#78d9ec",
    "W": "#fdd663",
    "wait": "#f28b82",
    "critical path": "#d01884",
    "block forward": "#c6dafc",
    "block backward": "#ceead6",
}
OTHER_COLOUR = "#dadce0"
"""Of phases before and after the actions."""
LANE_COLOUR = "#c58af9"
"""Of collectives and messages."""
ROW_HEIGHT = 24
BOX_HEIGHT = 20
LANE_HEIGHT = 9
TITLE_WIDTH = 64
MARGIN = 8
AXIS_HEIGHT = 26
LINE_HEIGHT = 16
MAX_TICKS = 10
CHARACTER_WIDTH = 7.2
"""Width of a character of the 12 px font, px."""
SMALL_FONT = 9
SMALL_CHARACTER_WIDTH = CHARACTER_WIDTH * SMALL_FONT / 12
PLOT_LEFT = MARGIN + TITLE_WIDTH
ROW_COLOUR = "#f1f3f4"
TICK_COLOUR = "#5f6368"


@dataclass(frozen=True)
class TitledTimeline:
    """A timeline and the texts of its picture.

    Attributes:
        title: the line above it.
        figures: the line below it; None: its bubble, its length and activations held at once.
        rank_names: at the left of the rows; () for `rank 0`, `rank 1` ...
    """

    title: str
    timeline: Timeline
    figures: str | None = None
    rank_names: tuple[str, ...] = ()

    @property
    def figures_text(self) -> str:
        """The line below the picture."""
        if self.figures is not None:
            return self.figures
        return figures(self.timeline.only(kinds=COMPUTE))

    def rank_name(self, rank: int) -> str:
        """The text at the left of the row of a rank."""
        return self.rank_names[rank] if self.rank_names else f"rank {rank}"


def svg(timeline: Timeline, *, title: str, width: int = 960, lanes: bool = False) -> str:
    """The actions of all ranks as an SVG document of this width in px.

    Args:
        lanes: also draw what is no action: phases, and the other lanes of each rank as thin rows.
    """
    return stacked_svg([TitledTimeline(title, timeline)], width=width, lanes=lanes)


def stacked_svg(titled: Sequence[TitledTimeline], *, width: int = 960, lanes: bool = False) -> str:
    """Timelines below each other on one time scale, as an SVG document; see `svg`."""
    drawn = [_drawn(each.timeline, lanes) for each in titled]
    lengths = [float(makespan(timeline)) for timeline in drawn]
    longest = max(lengths, default=0.0)
    plot_width = width - PLOT_LEFT - MARGIN
    scale = plot_width / longest if longest else 0.0
    parts: list[str] = []
    height = 0
    for each, timeline in zip(titled, drawn, strict=True):
        picture, height = _timeline_parts(each, timeline, top=height, width=width, scale=scale)
        parts.extend(picture)
    start = document_start(width, height, font_family="monospace", font_size=12)
    background = element("rect", width=width, height=height, fill="white")
    document = "\n".join([start, background, *parts, "</svg>"])
    return f"{document}\n"


def _drawn(timeline: Timeline, lanes: bool) -> Timeline:
    if lanes:
        return timeline
    return timeline.only(kinds=COMPUTE)


@dataclass(frozen=True)
class _BoxRow:
    """A row of boxes: the kernels of a rank, or one of its other lanes.

    Attributes:
        title: at its left.
        top, height: px.
        spans: on it.
    """

    title: str
    top: int
    height: int
    spans: tuple[Span, ...]

    @property
    def is_thin(self) -> bool:
        return self.height < BOX_HEIGHT


@dataclass(frozen=True)
class _TimeScale:
    """The scale from times to pixels.

    Attributes:
        first_start: the time at the left end.
        px_per_unit: of time.
    """

    first_start: float
    px_per_unit: float

    def x(self, time: float) -> float:
        return PLOT_LEFT + (time - self.first_start) * self.px_per_unit

    def width(self, duration: float) -> float:
        return duration * self.px_per_unit


def _timeline_parts(
    titled: TitledTimeline, drawn: Timeline, *, top: int, width: int, scale: float
) -> tuple[list[str], int]:
    """One picture whose upper end is at `top`, and its lower end."""
    computed = titled.timeline.only(kinds=COMPUTE)
    actions = [computed.actions(rank) for rank in range(computed.num_ranks)]
    columns = int((width - 2 * MARGIN) / CHARACTER_WIDTH)
    heading = wrapped(titled.title, columns)
    footer = wrapped(legend(actions), columns)
    footer += wrapped(titled.figures_text, columns)
    heading_height = LINE_HEIGHT * len(heading)
    footer_height = LINE_HEIGHT * len(footer)
    first_row_top = top + MARGIN + heading_height + 4
    rows, axis_top = _rows(titled, drawn, first_row_top)
    footer_top = axis_top + AXIS_HEIGHT

    starts = [float(span.start) for span in drawn.spans]
    times = _TimeScale(first_start=min(starts, default=0.0), px_per_unit=scale)
    labels = action_labels(actions)
    parts = _lines(heading, top=top + MARGIN, weight="bold")
    for row in rows:
        parts.append(_row_title(row))
        background = element(
            "rect",
            x=PLOT_LEFT,
            y=row.top,
            width=width - PLOT_LEFT - MARGIN,
            height=row.height,
            fill=ROW_COLOUR,
        )
        parts.append(background)
        for span in row.spans:
            label = "" if row.is_thin else labels.get(span.name, span.name)
            parts.append(_box(span, label, row=row, times=times))
    axis = _axis(float(makespan(drawn)), unit=drawn.unit, top=axis_top, scale=scale)
    parts.extend(axis)
    parts.extend(_lines(footer, top=footer_top))
    return parts, footer_top + footer_height + MARGIN


def _rows(titled: TitledTimeline, timeline: Timeline, top: int) -> tuple[list[_BoxRow], int]:
    """The rows of all ranks, and where they end."""
    rows: list[_BoxRow] = []
    for rank, spans in enumerate(timeline.by_rank):
        for lane in lanes_of(timeline, rank):
            is_main = lane == KERNELS
            row = _BoxRow(
                title=titled.rank_name(rank) if is_main else lane,
                top=top,
                height=BOX_HEIGHT if is_main else LANE_HEIGHT,
                spans=tuple(span for span in spans if span.lane == lane),
            )
            rows.append(row)
            top += row.height + 1
        top += ROW_HEIGHT - BOX_HEIGHT - 1
    return rows, top


def _row_title(row: _BoxRow) -> str:
    if not row.is_thin:
        return text_element(row.title, x=MARGIN, y=row.top + 14)
    return text_element(row.title, x=MARGIN + 6, y=row.top + LANE_HEIGHT - 1, font_size=SMALL_FONT)


def _box(span: Span, label: str, *, row: _BoxRow, times: _TimeScale) -> str:
    """A box with a tooltip, and its label where it fits."""
    start = float(span.start)
    end = float(span.end)
    left = times.x(start)
    width = times.width(float(span.duration))
    default_colour = OTHER_COLOUR if span.lane == KERNELS else LANE_COLOUR
    box = element(
        "rect",
        x=f"{left:.2f}",
        y=row.top,
        width=f"{width:.2f}",
        height=row.height,
        fill=COLOURS.get(span.kind, default_colour),
        stroke="white",
        stroke_width=0.8,
    )
    middle = f"{left + width / 2:.2f}"
    text = ""
    if label and len(label) * CHARACTER_WIDTH <= width:
        text = text_element(label, x=middle, y=row.top + 14, text_anchor="middle")
    elif label and len(label) * SMALL_CHARACTER_WIDTH <= width:
        text = text_element(
            label, x=middle, y=row.top + 13, text_anchor="middle", font_size=SMALL_FONT
        )
    tooltip = f"{span.name}: {start:g} to {end:g}"
    return with_tooltip(box + text, tooltip)


def _axis(length: float, *, unit: str, top: int, scale: float) -> list[str]:
    """Ticks at round times, and the makespan with the unit at the end."""
    end_label = f"{length:.4g} {unit}"
    end_label_width = len(end_label) * CHARACTER_WIDTH
    end_label_time = end_label_width / scale if scale else 0.0
    last_tick_time = length - 1.5 * end_label_time
    parts: list[str] = []
    step = _round_step(length / MAX_TICKS)
    time = 0.0
    while step and time < last_tick_time:
        x = PLOT_LEFT + time * scale
        parts.extend(_tick(x, f"{time:.4g}", top=top, anchor="middle"))
        time += step
    end_x = PLOT_LEFT + length * scale
    parts.extend(_tick(end_x, end_label, top=top, anchor="end"))
    return parts


def _tick(x: float, label: str, *, top: int, anchor: str) -> Iterator[str]:
    place = f"{x:.2f}"
    yield element("line", x1=place, y1=top, x2=place, y2=top + 4, stroke=TICK_COLOUR)
    yield text_element(label, x=place, y=top + 16, text_anchor=anchor)


def _round_step(least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is at least `least`; 0 for 0."""
    if least <= 0:
        return 0.0
    power: float = 10.0 ** math.floor(math.log10(least))
    for factor in (1, 2, 5):
        if factor * power >= least:
            return factor * power
    return 10 * power


def _lines(lines: list[str], *, top: int, weight: str = "normal") -> list[str]:
    """Lines of text below each other; runs of spaces are kept."""
    keeps_spaces = {"xml:space": "preserve"}
    parts = []
    for number, line in enumerate(lines):
        part = text_element(
            line, x=MARGIN, y=top + LINE_HEIGHT * number + 12, font_weight=weight, **keeps_spaces
        )
        parts.append(part)
    return parts
