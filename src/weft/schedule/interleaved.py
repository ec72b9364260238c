"""Owns interleaved 1F1B: v chunks a rank, 1/v of the bubble (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.2).

    table(ranks=4, chunks=2, microbatches=4)
    rank 0 │ 0a 1a 2a 3a 0b 1b 2b 3b ················· B0b── ·· B1b── ·· B2b── ·· B3b── B0a── B1a── B2a── B3a──
    rank 1 │ ·· 0a 1a 2a 3a 0b 1b 2b 3b ········ B0b── ·· B1b── ·· B2b── ·· B3b── B0a── B1a── B2a── B3a── ·····
    rank 2 │ ····· 0a 1a 2a 3a 0b 1b 2b ·· B0b── 3b B1b── ·· B2b── ·· B3b── B0a── B1a── B2a── B3a── ···········
    rank 3 │ ········ 0a 1a 2a 3a 0b B0b── 1b B1b── 2b B2b── 3b B3b── B0a── B1a── B2a── B3a── ·················

Stage s is chunk s // p of rank s % p; `a` marks a rank's first chunk, `b` its second. Bubble (p-1)/v / (m + (p-1)/v);
rank 0 holds p + (p-1)/v micro-batches when m > p, a chunk counting 1/v.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.errors import Fault
from weft.schedule.actions import KEY, Act, Table

NAME = "interleaved"
CHUNKS = range(2, 1024)


def check(ranks: int, chunks: int, microbatches: int) -> Fault | None:
    """Micro-batches travel in groups of `ranks`, so the ranks must divide their number."""
    if microbatches % ranks == 0:
        return None
    below, above = microbatches // ranks * ranks, (microbatches // ranks + 1) * ranks
    return Fault(
        KEY,
        "interleaved needs a number of micro-batches that the pipeline ranks divide",
        got=f"{microbatches} micro-batches on {ranks} ranks",
        need=f"a multiple of {ranks}",
        fix=f"run {f'{below} or ' if below else ''}{above} micro-batches, or take 1f1b, which takes any number",
    )


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """`chunks` stages a rank: stage s lives on rank s % ranks. `check` must have passed."""
    rows = tuple(tuple(_row(rank, ranks, chunks, microbatches)) for rank in range(ranks))
    return Table(rows, home=tuple(stage % ranks for stage in range(ranks * chunks)), microbatches=microbatches)


def _row(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Act]:
    """The k-th forward and the k-th backward of a rank: `ranks` micro-batches through each chunk in turn."""

    def forward(k: int) -> Act:
        group, chunk, mb = _place(k, ranks, chunks)
        return Act("F", chunk * ranks + rank, group * ranks + mb)

    def backward(k: int) -> Act:
        group, chunk, mb = _place(k, ranks, chunks)
        return Act("B", (chunks - 1 - chunk) * ranks + rank, group * ranks + mb)

    total = microbatches * chunks
    warmup = min((ranks - 1 - rank) * 2 + (chunks - 1) * ranks, total)
    yield from (forward(k) for k in range(warmup))
    for k in range(warmup, total):
        yield forward(k)
        yield backward(k - warmup)
    yield from (backward(k) for k in range(total - warmup, total))


def _place(k: int, ranks: int, chunks: int) -> tuple[int, int, int]:
    group, within = divmod(k, ranks * chunks)
    return group, *divmod(within, ranks)
