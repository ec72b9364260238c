"""1F1B: each backward as soon as it can run (Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1).

    table(ranks=4, chunks=1, microbatches=8)
    rank 0 │ 0 1 2 3 ··········· B0─ 4 B1─ 5 B2─ 6 B3─ 7 B4─ · B5─ · B6─ · B7─
    rank 1 │ · 0 1 2 ······· B0─ 3 B1─ 4 B2─ 5 B3─ 6 B4─ 7 B5─ · B6─ · B7─ ···
    rank 2 │ ··· 0 1 ··· B0─ 2 B1─ 3 B2─ 4 B3─ 5 B4─ 6 B5─ 7 B6─ · B7─ ·······
    rank 3 │ ····· 0 B0─ 1 B1─ 2 B2─ 3 B3─ 4 B4─ 5 B5─ 6 B6─ 7 B7─ ···········

GPipe's bubble, (p-1)/(m+p-1); but rank r holds at most p-r micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Act, Table

NAME = "1f1b"
CHUNKS = range(1, 2)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """One stage a rank; rank r holds at most `ranks - r` micro-batches."""
    return Table.of_rows(
        [_row(rank, ranks - 1 - rank, microbatches) for rank in range(ranks)],
        stage_to_rank=range(ranks),
        microbatches=microbatches,
    )


def _row(rank: int, ranks_behind: int, microbatches: int) -> Iterator[Act]:
    warmup = min(ranks_behind, microbatches)
    for mb in range(warmup):
        yield Act("F", rank, mb)
    for mb in range(warmup, microbatches):
        yield Act("F", rank, mb)
        yield Act("B", rank, mb - warmup)
    for mb in range(microbatches - warmup, microbatches):
        yield Act("B", rank, mb)
