"""Owns the text picture of a timeline: one row a rank, time from left to right.

rank 0 │ 0 1 2 ···· B0─ ··· B1─ ··· B2─
rank 1 │ ·0 ··1 B0─ 2 B1─ ····· B2─ ···
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from weft.schedule.actions import Act, Kind
from weft.schedule.simulate import most_held
from weft.schedule.timeline import COMPUTE, Span, Timeline, bubble, makespan

LEGEND: dict[Kind, str] = {"F": "0 forward", "B": "B0 backward", "I": "I0 input gradient", "W": "W0 weight gradient"}
IDLE = "·"
ROUNDING = 1e-6
"""Columns that rounding errors of times may amount to: a span that should start a column must not fall before it."""


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
        """What stands left of a row."""
        return f"rank {rank:>{len(str(len(self.rows) - 1))}} │ "


def draw(timeline: Timeline, *, width: int = 240) -> str:
    """The picture as plain text; see `picture`."""
    drawn = picture(timeline, width=width)
    rows = (drawn.title(rank) + "".join(cell.text for cell in row).rstrip() for rank, row in enumerate(drawn.rows))
    return "\n".join((*rows, *drawn.footer)) + "\n"


def picture(timeline: Timeline, *, width: int = 240) -> Picture:
    """What the ranks compute, over `width` columns, or fewer where every label fits; other spans are left out.

    An action is labelled by its micro-batch, a backward by its kind too, and where ranks hold several chunks by the
    chunk's letter: `B3b` is the backward of micro-batch 3 through the rank's second chunk.
    """
    computed = timeline.only(kinds=COMPUTE)
    played = tuple(map(computed.actions, range(timeline.num_ranks)))
    labels = _labels(played)
    narrowest = (span.duration_s / (len(labels[span.name]) + 1) for span in computed.spans if span.duration_s > 0)
    column_s = float(max(min(narrowest, default=1), makespan(computed) / width))
    return Picture(_rows(computed, labels, column_s), (_legend(played), _figures(computed)))


def _labels(played: Sequence[Sequence[Act]]) -> dict[str, str]:
    """The label of each action, by its name."""
    several = _chunks(played) > 1
    letter = {stage: _letter(chunk) if several else "" for row in played for chunk, stage in enumerate(_stages(row))}
    return {str(act): f"{act.kind.strip('F')}{act.mb}{letter[act.stage]}" for row in played for act in row}


def _stages(row: Sequence[Act]) -> list[int]:
    return sorted({act.stage for act in row})


def _chunks(played: Sequence[Sequence[Act]]) -> int:
    """Most stages that a rank owns."""
    return max((len(_stages(row)) for row in played), default=0)


def _letter(chunk: int) -> str:
    """`a` to `z`, then `aa` ..."""
    before, last = divmod(chunk, len(ascii_lowercase))
    return (_letter(before - 1) if before else "") + ascii_lowercase[last]


def _rows(timeline: Timeline, labels: dict[str, str], column_s: float) -> tuple[tuple[Cell, ...], ...]:
    origin_s = min((span.start_s for span in timeline.spans), default=0)

    def column(time_s: float) -> int:
        return int(float(time_s - origin_s) / column_s + ROUNDING)

    def cells(spans: Sequence[Span]) -> Iterator[Cell]:
        reached = 0
        for span in spans:
            start = max(column(span.start_s), reached)
            yield Cell(_fill("", start - reached, IDLE))
            reached = max(column(span.end_s), start)
            yield Cell(_fill(labels[span.name], reached - start, "─"), span.kind)
        yield Cell(_fill("", column(origin_s + makespan(timeline)) - reached, IDLE))

    return tuple(tuple(cell for cell in cells(spans) if cell.text) for spans in timeline.by_rank)


def _fill(label: str, length: int, filling: str) -> str:
    """`label`, filled up to `length` columns with one space at the end, or cut where it is longer."""
    return label.ljust(length - 1, filling)[:length].ljust(length)


def _legend(played: Sequence[Sequence[Act]]) -> str:
    kinds = {act.kind for row in played for act in row}
    chunks = ["a b ... first, second ... chunk of a rank"] if _chunks(played) > 1 else []
    return ", ".join((*(meaning for kind, meaning in LEGEND.items() if kind in kinds), *chunks))


def _figures(timeline: Timeline) -> str:
    held = " ".join(str(most_held(timeline.actions(rank))) for rank in range(timeline.num_ranks))
    return (
        f"{100 * float(bubble(timeline)):.1f}% bubble, {float(makespan(timeline)):.4g} s ({timeline.origin}); "
        f"activations held at once, by rank: {held}"
    )
