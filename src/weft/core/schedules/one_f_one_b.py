"""Owns 1F1B: as soon as a backward can run it does (Narayanan et al. 2019, PipeDream, in its flushing form)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.schedule import Act, Table

NAME = "1f1b"
CHUNKS = range(1, 2)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """One stage a rank; rank r holds at most `ranks - r` micro-batches."""
    rows = tuple(tuple(_row(rank, ranks - 1 - rank, microbatches)) for rank in range(ranks))
    return Table(rows, home=tuple(range(ranks)), microbatches=microbatches)


def _row(rank: int, ranks_behind: int, microbatches: int) -> Iterator[Act]:
    warmup = min(ranks_behind, microbatches)
    yield from (Act("F", rank, mb) for mb in range(warmup))
    for mb in range(warmup, microbatches):
        yield Act("F", rank, mb)
        yield Act("B", rank, mb - warmup)
    yield from (Act("B", rank, mb) for mb in range(microbatches - warmup, microbatches))
