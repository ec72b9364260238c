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
from weft.view.quantity import short_time

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
        last_rank = len(self.rows) - 1
        width = len(str(last_rank))
        padded_rank = str(rank).rjust(width)
        return f"rank {padded_rank} │ "


def draw(timeline: Timeline, *, width: int = 240, clip: int | None = None) -> str:
    """The picture as plain text; see `picture`.

    Args:
        clip: columns after which rows are cut and marked with `…`, and footer lines are wrapped;
            default: none.
    """
    drawn = picture(timeline, width=width)
    lines: list[str] = []
    for rank, row in enumerate(drawn.rows):
        line = drawn.title(rank)
        for cell in row:
            line += cell.text
        line = line.rstrip()
        lines.append(clipped(line, clip))
    for footer_line in drawn.footer:
        lines.extend(wrapped(footer_line, clip))
    text = "\n".join(lines)
    return f"{text}\n"


def clipped(line: str, columns: int | None) -> str:
    """The line, cut to this many columns with a mark at the end."""
    if columns is None or len(line) <= columns:
        return line
    num_kept = columns - 1
    return line[:num_kept] + CONTINUED


def wrapped(line: str, columns: int | None) -> list[str]:
    """The line as lines of at most this many columns, broken at a semicolon or at spaces;
    continuation lines are indented.
    """
    if columns is None or len(line) <= columns:
        return [line]
    first, separator, rest = line.partition("; ")
    if separator and len(first) < columns and len(rest) + 2 <= columns:
        return [f"{first};", f"  {rest}"]
    lines = [""]
    for word in line.split(" "):
        if lines[-1]:
            candidate = f"{lines[-1]} {word}"
        else:
            candidate = word
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
    actions = [computed.actions(rank) for rank in range(timeline.num_ranks)]
    labels = action_labels(actions)
    length = makespan(computed)
    starts = [span.start for span in computed.spans]
    first_start = min(starts, default=0)
    fitting_time = _fitting_column_time(computed.spans, labels)
    columns = _Columns(
        first_start=first_start, column_time=float(max(fitting_time, length / width))
    )
    num_columns = columns.at(first_start + length)
    rows: list[tuple[Cell, ...]] = []
    for spans in computed.by_rank:
        cells = _row_cells(spans, labels, columns, num_columns)
        rows.append(tuple(cell for cell in cells if cell.text))
    return Picture(rows=tuple(rows), footer=(legend(actions), figures(computed)))


def action_labels(rows: Sequence[Sequence[Act]]) -> dict[str, str]:
    """The label of each action, by its name."""
    has_chunks = num_chunks(rows) > 1
    labels: dict[str, str] = {}
    for row in rows:
        stages = _stages(row)
        for act in row:
            label = str(act.mb)
            if act.kind != "F":
                label = f"{act.kind}{label}"
            if has_chunks:
                chunk = stages.index(act.stage)
                label += _letter(chunk)
            labels[str(act)] = label
    return labels


def num_chunks(rows: Sequence[Sequence[Act]]) -> int:
    """Most stages that a rank owns."""
    numbers = [len(_stages(row)) for row in rows]
    return max(numbers, default=0)


def legend(rows: Sequence[Sequence[Act]]) -> str:
    """Meaning of the labels that occur."""
    kinds: set[Kind] = set()
    for row in rows:
        for act in row:
            kinds.add(act.kind)
    meanings: list[str] = []
    for kind, meaning in LEGEND.items():
        if kind in kinds:
            meanings.append(meaning)
    if num_chunks(rows) > 1:
        meanings.append(CHUNK_LEGEND)
    return ", ".join(meanings)


def figures(timeline: Timeline) -> str:
    """Bubble, makespan with its unit, and activations held at once."""
    held: list[int] = []
    for rank in range(timeline.num_ranks):
        actions = timeline.actions(rank)
        held.append(peak_activations(actions))
    percent = 100 * float(bubble(timeline))
    length = float(makespan(timeline))
    if timeline.unit == "s":
        duration = short_time(length)
    else:
        duration = f"{length:.4g} {timeline.unit}"
    parts = [f"{percent:.1f}% bubble", f"{duration} ({timeline.origin})"]
    return f"{', '.join(parts)}; activations held at once{_by_rank(held)}"


def _by_rank(numbers: Sequence[int]) -> str:
    """`: 4 (all ranks)` where all are equal, else `, by rank: 4 3 2 1`; longer lists end in `...`."""
    num_ranks = len(numbers)
    are_equal = len(set(numbers)) == 1
    if are_equal and num_ranks > 1:
        number = numbers[0]
        return f": {number} (all ranks)"
    words = [str(number) for number in numbers[:MAX_RANKS_SHOWN]]
    if num_ranks > MAX_RANKS_SHOWN:
        words.append("...")
    shown = " ".join(words)
    return f", by rank: {shown}"


def _stages(row: Sequence[Act]) -> list[int]:
    return sorted({act.stage for act in row})


def _letter(chunk: int) -> str:
    """`a` to `z`, then `aa` ..."""
    before, last = divmod(chunk, len(ascii_lowercase))
    letter = ascii_lowercase[last]
    if not before:
        return letter
    return _letter(before - 1) + letter


def _fitting_column_time(spans: Sequence[Span], labels: dict[str, str]) -> float:
    """The longest time a column may stand for so that every label fits, with a space behind it."""
    times: list[float] = []
    for span in spans:
        label = labels[span.name]
        num_columns = len(label) + 1
        if span.duration > 0:
            times.append(span.duration / num_columns)
    return min(times, default=1)


@dataclass(frozen=True)
class _Columns:
    """The scale from times to columns of text.

    Attributes:
        column_time: the time that a column stands for.
    """

    first_start: float
    column_time: float

    def at(self, time: float) -> int:
        """The column of a time."""
        since_start = float(time - self.first_start)
        return int(since_start / self.column_time + ROUNDING)


def _row_cells(
    spans: Sequence[Span], labels: dict[str, str], columns: _Columns, num_columns: int
) -> Iterator[Cell]:
    """The row of a rank: its actions, and the idle time between them; some cells are empty."""
    reached = 0
    for span in spans:
        start = max(columns.at(span.start), reached)
        end = max(columns.at(span.end), start)
        yield _idle(start - reached)
        label = labels[span.name]
        yield Cell(text=_filled(label, end - start, "─"), kind=span.kind)
        reached = end
    yield _idle(num_columns - reached)


def _idle(length: int) -> Cell:
    text = _filled("", length, IDLE)
    return Cell(text)


def _filled(label: str, length: int, filling: str) -> str:
    """`label`, filled up to `length` columns with one space at the end, or cut where it is longer."""
    filled = label.ljust(length - 1, filling)
    cut = filled[:length]
    return cut.ljust(length)
