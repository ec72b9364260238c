"""SVG picture of a timeline, or of several on one time scale: a row for each rank, a box for each action, a time axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from weft.schedule.timeline import COMPUTE, Span, Timeline, makespan
from weft.view.text import action_labels, figures, legend, wrapped

COLOURS = {"F": "#8ab4f8", "B": "#81c995", "I": "#78d9ec", "W": "#fdd663"}
ROW_HEIGHT = 24
BOX_HEIGHT = 20
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


def svg(timeline: Timeline, *, title: str, width: int = 960) -> str:
    """The actions of all ranks as an SVG document of this width in px; other spans are left out."""
    return stacked_svg([TitledTimeline(title, timeline)], width=width)


def stacked_svg(titled: Sequence[TitledTimeline], *, width: int = 960) -> str:
    """Timelines below each other on one time scale, as an SVG document."""
    longest = max((float(makespan(_computed(each.timeline))) for each in titled), default=0.0)
    plot_width = width - 2 * MARGIN - TITLE_WIDTH
    scale = plot_width / longest if longest else 0.0
    parts: list[str] = []
    height = 0
    for each in titled:
        drawn, height = _timeline_parts(each, top=height, width=width, scale=scale)
        parts.extend(drawn)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="monospace" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    document = "\n".join([*head, *parts, "</svg>"])
    return f"{document}\n"


def _computed(timeline: Timeline) -> Timeline:
    return timeline.only(kinds=COMPUTE)


def _timeline_parts(
    titled: TitledTimeline, *, top: int, width: int, scale: float
) -> tuple[list[str], int]:
    """One picture whose upper end is at `top`, and its lower end."""
    computed = _computed(titled.timeline)
    rows = [computed.actions(rank) for rank in range(computed.num_ranks)]
    labels = action_labels(rows)
    starts = [float(span.start) for span in computed.spans]
    first_start = min(starts, default=0.0)
    length = float(makespan(computed))
    inner_width = width - 2 * MARGIN
    plot_width = inner_width - TITLE_WIDTH
    columns = int(inner_width / CHARACTER_WIDTH)
    heading = wrapped(titled.title, columns)
    footer = wrapped(legend(rows), columns)
    footer += wrapped(figures(computed), columns)
    rows_top = top + MARGIN + LINE_HEIGHT * len(heading) + 4
    axis_top = rows_top + ROW_HEIGHT * computed.num_ranks
    footer_top = axis_top + AXIS_HEIGHT
    plot_left = MARGIN + TITLE_WIDTH

    parts = _lines(heading, top=top + MARGIN, weight="bold")
    for rank, spans in enumerate(computed.by_rank):
        row_top = rows_top + ROW_HEIGHT * rank
        parts.append(f'<text x="{MARGIN}" y="{row_top + 14}">rank {rank}</text>')
        parts.append(
            f'<rect x="{plot_left}" y="{row_top}" width="{plot_width}" height="{BOX_HEIGHT}" fill="#f1f3f4"/>'
        )
        for span in spans:
            since_start = float(span.start) - first_start
            box = _box(
                span,
                labels[span.name],
                left=plot_left + since_start * scale,
                top=row_top,
                width=float(span.duration) * scale,
            )
            parts.append(box)
    parts.extend(_axis(length, unit=computed.unit, top=axis_top, scale=scale))
    parts.extend(_lines(footer, top=footer_top))
    return parts, footer_top + LINE_HEIGHT * len(footer) + MARGIN


def _box(
    span: Span,
    label: str,
    *,
    left: float,
    top: int,
    width: float,
) -> str:
    """A box with a tooltip, and its label where it fits."""
    start = float(span.start)
    end = float(span.end)
    tooltip = escape(f"{span.name}: {start:g} to {end:g}")
    colour = COLOURS[span.kind]
    box = (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{BOX_HEIGHT}" fill="{colour}" '
        'stroke="white" stroke-width="0.8"/>'
    )
    text = ""
    shown = escape(label)
    middle = left + width / 2
    if len(label) * CHARACTER_WIDTH <= width:
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
