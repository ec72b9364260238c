"""SVG picture of a timeline: one row a rank, a box for each action, a time axis with its unit."""

from __future__ import annotations

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
NUM_TICKS = 8
CHARACTER_WIDTH = 7.2
"""Width of a character of the 12 px font, px."""


def svg(timeline: Timeline, *, title: str, width: int = 960) -> str:
    """The actions of all ranks as an SVG document of this width in px; other spans are left out."""
    computed = timeline.only(kinds=COMPUTE)
    rows = tuple(computed.actions(rank) for rank in range(timeline.num_ranks))
    labels = action_labels(rows)
    first_start = min((float(span.start) for span in computed.spans), default=0.0)
    length = float(makespan(computed))
    plot_width = width - TITLE_WIDTH - 2 * MARGIN
    scale = plot_width / length if length else 0.0
    columns = int((width - 2 * MARGIN) / CHARACTER_WIDTH)
    heading = wrapped(title, columns)
    footer = [*wrapped(legend(rows), columns), *wrapped(figures(computed), columns)]
    rows_top = MARGIN + LINE_HEIGHT * len(heading) + 4
    axis_top = rows_top + ROW_HEIGHT * timeline.num_ranks
    height = axis_top + AXIS_HEIGHT + LINE_HEIGHT * len(footer) + MARGIN

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="monospace" font-size="12">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    parts.extend(_lines(heading, top=MARGIN, weight="bold"))
    for rank, spans in enumerate(computed.by_rank):
        top = rows_top + ROW_HEIGHT * rank
        parts.append(f'<text x="{MARGIN}" y="{top + 14}">rank {rank}</text>')
        parts.append(
            f'<rect x="{MARGIN + TITLE_WIDTH}" y="{top}" width="{plot_width}" height="{BOX_HEIGHT}" fill="#f1f3f4"/>'
        )
        for span in spans:
            left = MARGIN + TITLE_WIDTH + (float(span.start) - first_start) * scale
            parts.append(_box(span, labels[span.name], left=left, top=top, width=float(span.duration) * scale))
    parts.extend(_axis(length, unit=timeline.unit, top=axis_top, scale=scale))
    parts.extend(_lines(footer, top=axis_top + AXIS_HEIGHT))
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _box(span: Span, label: str, *, left: float, top: int, width: float) -> str:
    """A box with a tooltip, and its label where it fits."""
    tooltip = escape(f"{span.name}: {float(span.start):g} to {float(span.end):g}")
    box = (
        f'<rect x="{left:.2f}" y="{top}" width="{width:.2f}" height="{BOX_HEIGHT}" fill="{COLOURS[span.kind]}" '
        'stroke="white" stroke-width="0.8"/>'
    )
    text = ""
    if len(label) * CHARACTER_WIDTH <= width:
        middle = left + width / 2
        text = f'<text x="{middle:.2f}" y="{top + 14}" text-anchor="middle">{escape(label)}</text>'
    return f"<g><title>{tooltip}</title>{box}{text}</g>"


def _axis(length: float, *, unit: str, top: int, scale: float) -> list[str]:
    """Ticks with times, the last one with the unit."""
    parts = []
    for index in range(NUM_TICKS + 1):
        time = length * index / NUM_TICKS
        x = MARGIN + TITLE_WIDTH + time * scale
        anchor = "middle" if index < NUM_TICKS else "end"
        suffix = f" {unit}" if index == NUM_TICKS else ""
        parts.append(f'<line x1="{x:.2f}" y1="{top}" x2="{x:.2f}" y2="{top + 4}" stroke="#5f6368"/>')
        parts.append(f'<text x="{x:.2f}" y="{top + 16}" text-anchor="{anchor}">{time:.4g}{suffix}</text>')
    return parts


def _lines(lines: list[str], *, top: int, weight: str = "normal") -> list[str]:
    parts = []
    for number, line in enumerate(lines):
        y = top + LINE_HEIGHT * number + 12
        parts.append(f'<text x="{MARGIN}" y="{y}" font-weight="{weight}" xml:space="preserve">{escape(line)}</text>')
    return parts
