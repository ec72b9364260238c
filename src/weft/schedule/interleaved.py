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

from weft.errors import Fault, counted
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
        got=f"{counted(microbatches, 'micro-batch', 'micro-batches')} on {counted(ranks, 'rank')}",
        need=f"a multiple of {ranks}",
        fix=f"run {nearest} micro-batches, or use 1f1b, which accepts any number",
    )


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """`chunks` stages a rank: stage s is on rank s % ranks. `check` must have passed."""
    return Table.of_rows(
        [_row(rank, ranks, chunks, microbatches) for rank in range(ranks)],
        stage_to_rank=tuple(range(ranks)) * chunks,
        microbatches=microbatches,
    )


def _row(rank: int, ranks: int, chunks: int, microbatches: int) -> Iterator[Act]:
    """1F1B over the rank's forwards and backwards, which are listed in their order first."""
    forwards: list[Act] = []
    backwards: list[Act] = []
    for first_mb in range(0, microbatches, ranks):
        for chunk in range(chunks):
            for mb in range(first_mb, first_mb + ranks):
                stage = chunk * ranks + rank
                # backwards go through the chunks from the last to the first
                mirrored_stage = (chunks - 1 - chunk) * ranks + rank
                forwards.append(Act("F", stage, mb))
                backwards.append(Act("B", mirrored_stage, mb))

    total = microbatches * chunks
    ranks_behind = ranks - 1 - rank
    # a gradient comes back once the first group has passed all chunks; 2 for each rank behind, as
    # forwards and backwards of these ranks stand between
    warmup = min(2 * ranks_behind + (chunks - 1) * ranks, total)
    yield from forwards[:warmup]
    for k in range(warmup, total):
        yield forwards[k]
        yield backwards[k - warmup]
    yield from backwards[total - warmup :]
