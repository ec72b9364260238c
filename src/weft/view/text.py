"""Text picture of a timeline: one row a rank, time from left to right.

rank 0 │ 0 1 2 ···· B0─ ··· B1─ ··· B2─
rank 1 │ ·0 ··1 B0─ 2 B1─ ····· B2─ ···
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from weft.schedule.actions import Act, Kind
from weft.schedule.simulate import peak_activations
from weft.schedule.timeline import COMPUTE, Span, Timeline, bubble, makespan

LEGEND: dict[Kind, str] = {
    "F": "0 forward",
    "B": "B0 backward",
    "I": "I0 input gradient",
    "W": "W0 weight gradient",
}
CHUNK_LEGEND = "a b ... first, second ... chunk of a rank"
IDLE = "·"
CONTINUED = "…"
MAX_RANKS_SHOWN = 8
"""Ranks whose number of activations is listed."""
ROUNDING = 1e-6
"""Tolerance in columns for rounding errors of times: a span that should start a column must not
fall before it.
"""


@dataclass(frozen=True, slots=True)
class Cell:
    """A stretch of a row: its text, and the kind of action that runs there, "" for none."""

    text: str
    kind: str = ""


@dataclass(frozen=True)
class Picture:
    """The cells of each rank's row, and the lines below them."""

    rows: tuple[tuple[Cell, ...], ...]
    footer: tuple[str, ...]

    def title(self, rank: int) -> str:
        """Text at the left of a row."""
        digits = len(str(len(self.rows) - 1))
        return f"rank {rank:>{digits}} │ "


def draw(timeline: Timeline, *, width: int = 240, clip: int | None = None) -> str:
    """The picture as plain text; see `picture`.

    Args:
        clip: columns after which rows are cut and marked with `…`, and footer lines are wrapped;
            default: none.
    """
    drawn = picture(timeline, width=width)
    lines = []
    for rank, row in enumerate(drawn.rows):
        line = drawn.title(rank) + "".join(cell.text for cell in row)
        lines.append(clipped(line.rstrip(), clip))
    for line in drawn.footer:
        lines.extend(wrapped(line, clip))
    return "\n".join(lines) + "\n"


def clipped(line: str, columns: int | None) -> str:
    """The line, cut to this many columns with a mark at the end."""
    if columns is None or len(line) <= columns:
        return line
    return line[: columns - 1] + CONTINUED


def wrapped(line: str, columns: int | None) -> list[str]:
    """The line as lines of at most this many columns, broken at spaces; continuation lines are
    indented.
    """
    if columns is None:
        return [line]
    lines = [""]
    for word in line.split(" "):
        candidate = f"{lines[-1]} {word}" if lines[-1] else word
        if len(candidate) <= columns or not lines[-1].strip():
            lines[-1] = candidate
        else:
            lines.append(f"  {word}")
    return lines


def picture(timeline: Timeline, *, width: int = 240) -> Picture:
    """The actions of all ranks over `width` columns, or fewer where every label fits; other spans
    are left out.

    An action is labelled by its micro-batch, a backward by its kind too, and where ranks hold
    several chunks by the chunk's letter: `B3b` is the backward of micro-batch 3 through the rank's
    second chunk.
    """
    computed = timeline.only(kinds=COMPUTE)
    rows = tuple(computed.actions(rank) for rank in range(timeline.num_ranks))
    labels = action_labels(rows)
    column_widths = []
    for span in computed.spans:
        if span.duration > 0:
            column_widths.append(span.duration / (len(labels[span.name]) + 1))
    fitting = min(column_widths, default=1)
    column_time = float(max(fitting, makespan(computed) / width))
    footer = (legend(rows), figures(computed))
    return Picture(_cells(computed, labels, column_time), footer)


def action_labels(rows: Sequence[Sequence[Act]]) -> dict[str, str]:
    """The label of each action, by its name."""
    has_chunks = num_chunks(rows) > 1
    labels = {}
    for row in rows:
        letters = {
            stage: _letter(chunk) if has_chunks else "" for chunk, stage in enumerate(_stages(row))
        }
        for act in row:
            kind = "" if act.kind == "F" else act.kind
            labels[str(act)] = f"{kind}{act.mb}{letters[act.stage]}"
    return labels


def num_chunks(rows: Sequence[Sequence[Act]]) -> int:
    """Most stages that a rank owns."""
    return max((len(_stages(row)) for row in rows), default=0)


def legend(rows: Sequence[Sequence[Act]]) -> str:
    """Meaning of the labels that occur."""
    kinds = {act.kind for row in rows for act in row}
    meanings = [meaning for kind, meaning in LEGEND.items() if kind in kinds]
    if num_chunks(rows) > 1:
        meanings.append(CHUNK_LEGEND)
    return ", ".join(meanings)


def figures(timeline: Timeline) -> str:
    """Bubble, makespan with its unit, and activations held at once."""
    held = [peak_activations(timeline.actions(rank)) for rank in range(timeline.num_ranks)]
    percent = 100 * float(bubble(timeline))
    length = f"{float(makespan(timeline)):.4g} {timeline.unit} ({timeline.origin})"
    return f"{percent:.1f}% bubble, {length}; activations held at once{_by_rank(held)}"


def _by_rank(numbers: Sequence[int]) -> str:
    """`: 4 (all ranks)` where all are equal, else `, by rank: 4 3 2 1`; longer lists end in `...`."""
    if len(numbers) > 1 and len(set(numbers)) == 1:
        return f": {numbers[0]} (all ranks)"
    shown = " ".join(map(str, numbers[:MAX_RANKS_SHOWN]))
    more = " ..." if len(numbers) > MAX_RANKS_SHOWN else ""
    return f", by rank: {shown}{more}"


def _stages(row: Sequence[Act]) -> list[int]:
    return sorted({act.stage for act in row})


def _letter(chunk: int) -> str:
    """`a` to `z`, then `aa` ..."""
    before, last = divmod(chunk, len(ascii_lowercase))
    prefix = _letter(before - 1) if before else ""
    return prefix + ascii_lowercase[last]


def _cells(
    timeline: Timeline, labels: dict[str, str], column_time: float
) -> tuple[tuple[Cell, ...], ...]:
    first_start = min((span.start for span in timeline.spans), default=0)
    last_end = first_start + makespan(timeline)

    def column(time: float) -> int:
        return int(float(time - first_start) / column_time + ROUNDING)

    def row_cells(spans: Sequence[Span]) -> Iterator[Cell]:
        reached = 0
        for span in spans:
            start = max(column(span.start), reached)
            end = max(column(span.end), start)
            yield Cell(_filled("", start - reached, IDLE))
            yield Cell(_filled(labels[span.name], end - start, "─"), span.kind)
            reached = end
        yield Cell(_filled("", column(last_end) - reached, IDLE))

    rows = []
    for spans in timeline.by_rank:
        rows.append(tuple(cell for cell in row_cells(spans) if cell.text))
    return tuple(rows)


def _filled(label: str, length: int, filling: str) -> str:
    """`label`, filled up to `length` columns with one space at the end, or cut where it is longer."""
    return label.ljust(length - 1, filling)[:length].ljust(length)
