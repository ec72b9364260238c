"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965).

    table(ranks=4, chunks=1, microbatches=8)
    rank 0 │ 0 1 2 3 4 5 6 7 ················· B7─ B6─ B5─ B4─ B3─ B2─ B1─ B0─
    rank 1 │ · 0 1 2 3 4 5 6 7 ··········· B7─ B6─ B5─ B4─ B3─ B2─ B1─ B0─ ···
    rank 2 │ ··· 0 1 2 3 4 5 6 7 ····· B7─ B6─ B5─ B4─ B3─ B2─ B1─ B0─ ·······
    rank 3 │ ····· 0 1 2 3 4 5 6 7 B7─ B6─ B5─ B4─ B3─ B2─ B1─ B0─ ···········

Bubble (p-1)/(m+p-1); every rank holds all m micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Act, Table

NAME = "gpipe"
CHUNKS = range(1, 2)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """One stage a rank; backwards run last in, first out, so that the newest activation is freed
    first.
    """
    return Table.of_rows(
        [_row(rank, microbatches) for rank in range(ranks)],
        stage_to_rank=range(ranks),
        microbatches=microbatches,
    )


def _row(rank: int, microbatches: int) -> Iterator[Act]:
    for mb in range(microbatches):
        yield Act("F", rank, mb)
    for mb in reversed(range(microbatches)):
        yield Act("B", rank, mb)
