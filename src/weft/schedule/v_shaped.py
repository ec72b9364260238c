"""V-shaped schedules: which rank owns which stages, and rows written as words such as "Fa Bb".

rank       0   1   2   3       rank r owns stage r, its chunk a, and stage 2p-1-r, its chunk b;
chunk a    0 → 1 → 2 → 3       the first and the last stage are both on rank 0, the turn is on rank p-1
chunk b    7 ← 6 ← 5 ← 4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import cast

from weft.schedule.actions import Act, Kind, Table

RowWords = Callable[[int], Iterable[str]]
"""Rank -> its row: "Fa" is the next forward through chunk a, "Bb" and "Ib" the next backward
through chunk b, whole or without weight gradients, "Wb" the oldest pending weight gradient of chunk
b, "W*" the oldest of either chunk."""

Phases = Iterable[tuple[str, int]]
"""Words, and how many times they are repeated."""


def v_shaped_table(row_words: RowWords, *, ranks: int, microbatches: int) -> Table:
    """The V-shaped table with these rows; actions of micro-batches that do not exist are left out."""
    stage_to_rank = (*range(ranks), *reversed(range(ranks)))
    rows = []
    for rank in range(ranks):
        stages = {"a": rank, "b": 2 * ranks - 1 - rank}
        actions = _actions(row_words(rank), stages)
        rows.append(tuple(act for act in actions if act.mb < microbatches))
    return Table(tuple(rows), stage_to_rank=stage_to_rank, microbatches=microbatches)


def repeat_phases(phases: Phases) -> Iterator[str]:
    """The words of each phase, repeated."""
    for words, times in phases:
        for _ in range(times):
            yield from words.split()


def _actions(words: Iterable[str], stages: dict[str, int]) -> Iterator[Act]:
    num_forwards: Counter[str] = Counter()
    num_backwards: Counter[str] = Counter()
    pending_wgrads: list[Act] = []
    for word in words:
        kind, chunk = cast(Kind, word[0]), word[1]
        if kind == "W":
            wgrad = _oldest(pending_wgrads, stages, chunk)
            pending_wgrads.remove(wgrad)
            yield wgrad
            continue
        counter = num_forwards if kind == "F" else num_backwards
        mb = counter[chunk]
        counter[chunk] += 1
        yield Act(kind, stages[chunk], mb)
        if kind == "I":
            pending_wgrads.append(Act("W", stages[chunk], mb))


def _oldest(pending_wgrads: Sequence[Act], stages: dict[str, int], chunk: str) -> Act:
    """The oldest pending weight gradient of this chunk, or of any for `*`."""
    for act in pending_wgrads:
        if chunk == "*" or act.stage == stages[chunk]:
            return act
    raise AssertionError(f"the row asks for a weight gradient of chunk {chunk} and none is pending")
