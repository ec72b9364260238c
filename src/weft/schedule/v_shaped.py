"""Owns what V-shaped schedules share: which rank holds which stages, and rows that are written as words.

rank       0   1   2   3       rank r holds stage r, its chunk a, and stage 2p-1-r, its chunk b;
chunk a    0 → 1 → 2 → 3       the first and the last stage meet on rank 0, the turn is on rank p-1
chunk b    7 ← 6 ← 5 ← 4
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from weft.schedule.actions import Act, Kind, Table

Words = Callable[[int], Iterable[str]]
"""Rank -> its row: "Fa" is the next forward through chunk a, "Bb" and "Ib" the next backward through chunk b, whole or without
weight gradients, "Wb" the weight gradients of chunk b that have waited longest, "W*" those of either chunk."""


def vee_table(words: Words, *, ranks: int, microbatches: int) -> Table:
    """The V-shaped table that has these rows; what a row says of micro-batches that do not exist is left out."""
    home = (*range(ranks), *reversed(range(ranks)))
    rows = (_acts(words(rank), {"a": rank, "b": 2 * ranks - 1 - rank}) for rank in range(ranks))
    kept = (tuple(act for act in row if act.mb < microbatches) for row in rows)
    return Table(tuple(kept), home=home, microbatches=microbatches)


def _acts(words: Iterable[str], stages: dict[str, int]) -> Iterator[Act]:
    count: Counter[tuple[bool, str]] = Counter()
    owed: list[Act] = []
    for word in words:
        kind, chunk = word[0], word[1]
        if kind == "W":
            paid = next(act for act in owed if chunk in ("*", "ab"[act.stage == stages["b"]]))
            owed.remove(paid)
            yield paid
            continue
        mb = count[kind == "F", chunk]
        count[kind == "F", chunk] += 1
        yield Act(cast(Kind, kind), stages[chunk], mb)
        if kind == "I":
            owed.append(Act("W", stages[chunk], mb))
