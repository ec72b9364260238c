"""Owns GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""

from __future__ import annotations

from collections.abc import Iterator

from weft.core.schedule import Act, Table

NAME = "gpipe"
CHUNKS = range(1, 2)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """One stage a rank; backwards run last in, first out, so that the newest activation is freed first."""
    rows = tuple(tuple(_row(rank, microbatches)) for rank in range(ranks))
    return Table(rows, home=tuple(range(ranks)), microbatches=microbatches)


def _row(rank: int, microbatches: int) -> Iterator[Act]:
    yield from (Act("F", rank, mb) for mb in range(microbatches))
    yield from (Act("B", rank, mb) for mb in reversed(range(microbatches)))
