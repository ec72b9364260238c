"""Interleaved 1F1B: v chunks a rank, 1/v of the bubble (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).

    table(ranks=4, chunks=2, microbatches=4)
    rank 0 │ 0a 1a 2a 3a 0b 1b 2b 3b ················· B0b── ·· B1b── ·· B2b── ·· B3b── B0a── B1a── B2a── B3a──
    rank 1 │ ·· 0a 1a 2a 3a 0b 1b 2b 3b ········ B0b── ·· B1b── ·· B2b── ·· B3b── B0a── B1a── B2a── B3a── ·····
    rank 2 │ ····· 0a 1a 2a 3a 0b 1b 2b ·· B0b── 3b B1b── ·· B2b── ·· B3b── B0a── B1a── B2a── B3a── ···········
    rank 3 │ ········ 0a 1a 2a 3a 0b B0b── 1b B1b── 2b B2b── 3b B3b── B0a── B1a── B2a── B3a── ·················

Stage s is chunk s // p of rank s % p; `a` marks a rank's first chunk, `b` its second. Bubble
(p-1)/v / (m + (p-1)/v); rank 0 holds p + (p-1)/v micro-batches when m > p, a chunk counting 1/v.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from weft.errors import Fault
from weft.schedule.actions import KEY, Act, Table

NAME = "interleaved"
CHUNKS = range(2, 1024)


def check(ranks: int, chunks: int, microbatches: int) -> Fault | None:
    """Micro-batches travel in groups of `ranks`, so the ranks must divide their number."""
    if microbatches % ranks == 0:
        return None
    below = microbatches // ranks * ranks
    above = below + ranks
    nearest = f"{below} or {above}" if below else str(above)
    return Fault(
        KEY,
        "interleaved needs the number of micro-batches to be a multiple of the pipeline ranks",
        got=f"{microbatches} micro-batches on {ranks} ranks",
        need=f"a multiple of {ranks}",
        fix=f"run {nearest} micro-batches, or use 1f1b, which accepts any number",
    )


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """`chunks` stages a rank: stage s is on rank s % ranks. `check` must have passed."""
    rows = tuple(tuple(_row(rank, ranks, chunks, microbatches)) for rank in range(ranks))
    stage_to_rank = tuple(stage % ranks for stage in range(ranks * chunks))
    return Table(rows, stage_to_rank=stage_to_rank, microbatches=microbatches)


def _row(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Act]:
    """Forwards and backwards of a rank: `ranks` micro-batches through each chunk in turn."""

    def forward(k: int) -> Act:
        place = _kth_action(k, ranks, chunks)
        return Act("F", place.chunk * ranks + rank, place.mb)

    def backward(k: int) -> Act:
        place = _kth_action(k, ranks, chunks)
        chunk = chunks - 1 - place.chunk
        return Act("B", chunk * ranks + rank, place.mb)

    total = microbatches * chunks
    warmup = min((ranks - 1 - rank) * 2 + (chunks - 1) * ranks, total)
    yield from (forward(k) for k in range(warmup))
    for k in range(warmup, total):
        yield forward(k)
        yield backward(k - warmup)
    yield from (backward(k) for k in range(total - warmup, total))


class _Place(NamedTuple):
    chunk: int
    mb: int


def _kth_action(k: int, ranks: int, chunks: int) -> _Place:
    """Chunk and micro-batch of a rank's k-th forward; a group is `ranks` micro-batches through all
    chunks.
    """
    group, index_in_group = divmod(k, ranks * chunks)
    chunk, mb_in_group = divmod(index_in_group, ranks)
    return _Place(chunk, group * ranks + mb_in_group)
