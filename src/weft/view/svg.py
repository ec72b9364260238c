"""SVG picture of a timeline, or of several on one time scale: a row for each rank, a box for each action, a time axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.schedule.timeline import COMPUTE, KERNELS, Span, Timeline, lanes_of, makespan
from weft.view.text import action_labels, figures, legend, wrapped

COLOURS = {"F": "#8ab4f8", "B": "#81c995", "I": "#78d9ec", "W": "#fdd663"}
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


@dataclass(frozen=True)
class TitledTimeline:
    """A timeline and the line above its picture."""

    title: str
    timeline: Timeline


def svg(timeline: Timeline, *, title: str, width: int = 960, lanes: bool = False) -> str:
    """The actions of all ranks as an SVG document of this width in px.

    Args:
        lanes: also draw what is no action: phases, and the other lanes of each rank as thin rows.
    """
    return stacked_svg([TitledTimeline(title, timeline)], width=width, lanes=lanes)


def stacked_svg(titled: Sequence[TitledTimeline], *, width: int = 960, lanes: bool = False) -> str:
    """Timelines below each other on one time scale, as an SVG document; see `svg`."""
    longest = max((float(makespan(_drawn(each.timeline, lanes))) for each in titled), default=0.0)
    plot_width = width - 2 * MARGIN - TITLE_WIDTH
    scale = plot_width / longest if longest else 0.0
    parts: list[str] = []
    height = 0
    for each in titled:
        drawn = _drawn(each.timeline, lanes)
        picture, height = _timeline_parts(each, drawn, top=height, width=width, scale=scale)
        parts.extend(picture)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="monospace" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    document = "\n".join([*head, *parts, "</svg>"])
    return f"{document}\n"


def _drawn(timeline: Timeline, lanes: bool) -> Timeline:
    return timeline if lanes else timeline.only(kinds=COMPUTE)


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


def _timeline_parts(
    titled: TitledTimeline, drawn: Timeline, *, top: int, width: int, scale: float
) -> tuple[list[str], int]:
    """One picture whose upper end is at `top`, and its lower end."""
    computed = titled.timeline.only(kinds=COMPUTE)
    actions = [computed.actions(rank) for rank in range(computed.num_ranks)]
    labels = action_labels(actions)
    first_start = min((float(span.start) for span in drawn.spans), default=0.0)
    inner_width = width - 2 * MARGIN
    plot_width = inner_width - TITLE_WIDTH
    columns = int(inner_width / CHARACTER_WIDTH)
    heading = wrapped(titled.title, columns)
    footer = wrapped(legend(actions), columns)
    footer += wrapped(figures(computed), columns)
    rows, axis_top = _rows(drawn, top + MARGIN + LINE_HEIGHT * len(heading) + 4)
    footer_top = axis_top + AXIS_HEIGHT
    plot_left = MARGIN + TITLE_WIDTH

    parts = _lines(heading, top=top + MARGIN, weight="bold")
    for row in rows:
        parts.append(_row_title(row))
        parts.append(
            f'<rect x="{plot_left}" y="{row.top}" width="{plot_width}" height="{row.height}" fill="#f1f3f4"/>'
        )
        for span in row.spans:
            since_start = float(span.start) - first_start
            box = _box(
                span,
                "" if row.is_thin else labels.get(span.name, span.name),
                left=plot_left + since_start * scale,
                top=row.top,
                width=float(span.duration) * scale,
                height=row.height,
            )
            parts.append(box)
    length = float(makespan(drawn))
    parts.extend(_axis(length, unit=drawn.unit, top=axis_top, scale=scale))
    parts.extend(_lines(footer, top=footer_top))
    return parts, footer_top + LINE_HEIGHT * len(footer) + MARGIN


def _rows(timeline: Timeline, top: int) -> tuple[list[_BoxRow], int]:
    """The rows of all ranks, and where they end."""
    rows: list[_BoxRow] = []
    for rank, spans in enumerate(timeline.by_rank):
        for lane in lanes_of(timeline, rank):
            on_lane = tuple(span for span in spans if span.lane == lane)
            if lane == KERNELS:
                rows.append(_BoxRow(f"rank {rank}", top, BOX_HEIGHT, on_lane))
                top += BOX_HEIGHT + 1
            else:
                rows.append(_BoxRow(lane, top, LANE_HEIGHT, on_lane))
                top += LANE_HEIGHT + 1
        top += ROW_HEIGHT - BOX_HEIGHT - 1
    return rows, top


def _row_title(row: _BoxRow) -> str:
    if not row.is_thin:
        return f'<text x="{MARGIN}" y="{row.top + 14}">{row.title}</text>'
    baseline = row.top + LANE_HEIGHT - 1
    return (
        f'<text x="{MARGIN + 6}" y="{baseline}" font-size="{SMALL_FONT}">{escape(row.title)}</text>'
    )


def _box(
    span: Span,
    label: str,
    *,
    left: float,
    top: int,
    width: float,
    height: int,
) -> str:
    """A box with a tooltip, and its label where it fits."""
    start = float(span.start)
    end = float(span.end)
    tooltip = escape(f"{span.name}: {start:g} to {end:g}")
    colour = COLOURS.get(span.kind, OTHER_COLOUR if span.lane == KERNELS else LANE_COLOUR)
    box = (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{height}" fill="{colour}" '
        'stroke="white" stroke-width="0.8"/>'
    )
    text = ""
    shown = escape(label)
    middle = left + width / 2
    if not label:
        pass
    elif len(label) * CHARACTER_WIDTH <= width:
        text = f'<text x="{middle:.2f}" y="{top + 14}" text-anchor="middle">{shown}</text>'
    elif len(label) * SMALL_CHARACTER_WIDTH <= width:
        size = f'font-size="{SMALL_FONT}"'
        text = f'<text x="{middle:.2f}" y="{top + 13}" text-anchor="middle" {size}>{shown}</text>'
    return f"<g><title>{tooltip}</title>{box}{text}</g>"


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
        x = time * scale
        parts.extend(_tick(x, f"{time:.4g}", top=top, anchor="middle"))
        time += step
    parts.extend(_tick(length * scale, end_label, top=top, anchor="end"))
    return parts


def _tick(offset: float, label: str, *, top: int, anchor: str) -> list[str]:
    x = MARGIN + TITLE_WIDTH + offset
    return [
        f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 4}" stroke="#5f6368"/>',
        f'<text x="{x:.2f}" y="{top + 16}" text-anchor="{anchor}">{label}</text>',
    ]


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
    parts = []
    for number, line in enumerate(lines):
        y = top + LINE_HEIGHT * number + 12
        parts.append(
            f'<text x="{MARGIN}" y="{y}" font-weight="{weight}" xml:space="preserve">{escape(line)}</text>'
        )
    return parts
