"""V-shaped schedules: which rank owns which stages, and rows written as words such as "Fa Bb".

rank       0   1   2   3       rank r owns stage r, its chunk a, and stage 2p-1-r, its chunk b;
chunk a    0 → 1 → 2 → 3       the first and the last stage are both on rank 0, the turn is on rank p-1
chunk b    7 ← 6 ← 5 ← 4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
    downwards = range(ranks)
    rows: list[list[Act]] = []
    for rank in downwards:
        last_stage = 2 * ranks - 1
        stages = {"a": rank, "b": last_stage - rank}
        words = row_words(rank)
        # left out only here: the counters of the row go by all micro-batches that its pattern has
        row = [act for act in _actions(words, stages) if act.mb < microbatches]
        rows.append(row)
    return Table.of_rows(
        rows, stage_to_rank=(*downwards, *reversed(downwards)), microbatches=microbatches
    )


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
        kind = cast(Kind, word[0])
        chunk = word[1]
        if kind == "W":
            stage_or_any = stages.get(chunk)
            yield _take_oldest(pending_wgrads, stage_or_any)
            continue
        counter = num_forwards if kind == "F" else num_backwards
        mb = counter[chunk]
        counter[chunk] += 1
        stage = stages[chunk]
        yield Act(kind, stage, mb)
        if kind == "I":
            pending_wgrads.append(Act("W", stage, mb))


def _take_oldest(pending_wgrads: list[Act], stage: int | None) -> Act:
    """Remove the oldest pending weight gradient of this stage, or of any for None."""
    # few are pending at any time, so a list is enough
    for index, act in enumerate(pending_wgrads):
        is_asked_for = stage is None or act.stage == stage
        if is_asked_for:
            del pending_wgrads[index]
            return act
    raise AssertionError(f"the row asks for a weight gradient of stage {stage} and none is pending")
