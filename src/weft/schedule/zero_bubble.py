"""ZB-H1: 1F1B whose weight gradients are delayed and fill the bubble at the end (Qi et al. 2023, arXiv 2401.10241, section 2.1).

    table(ranks=4, chunks=1, microbatches=8)
    rank 0 │ 0─ 1─ 2─ 3─ ········ I0 W0 4─ I1 W1 5─ I2 W2 6─ I3 W3 7─ I4 W4 I5 W5 I6 W6 I7 W7
    rank 1 │ ·· 0─ 1─ 2─ ····· I0 3─ I1 W0 4─ I2 W1 5─ I3 W2 6─ I4 W3 7─ I5 W4 I6 W5 I7 W6 W7
    rank 2 │ ····· 0─ 1─ ·· I0 2─ I1 3─ I2 W0 4─ I3 W1 5─ I4 W2 6─ I5 W3 7─ I6 W4 I7 W5 W6 W7
    rank 3 │ ········ 0─ I0 1─ I1 2─ I2 3─ I3 W0 4─ I4 W1 5─ I5 W2 6─ I6 W3 7─ I7 W4 W5 W6 W7

Rank r starts as in 1F1B and delays its weight gradients by r micro-batches, so that every rank
holds at most p micro-batches. Idle time of a rank (p-1)(F+B-2W) with m >= p and W no longer than F
and I = B - W, a third of 1F1B's where F = I = W.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Act, Table

NAME = "zero_bubble"
CHUNKS = range(1, 2)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """One stage a rank; rank r runs `ranks - r` forwards before its first backward and delays r
    weight gradients.
    """
    rows: list[Iterator[Act]] = [
        delayed_row(rank, microbatches, warmup=ranks - rank, lag=rank) for rank in range(ranks)
    ]
    return Table.of_rows(rows, stage_to_rank=range(ranks), microbatches=microbatches)


def delayed_row(stage: int, microbatches: int, *, warmup: int, lag: int) -> Iterator[Act]:
    """`warmup` forwards; then input gradients, each followed by the weight gradient of `lag`
    micro-batches before and by the next forward. At most `warmup + lag` micro-batches are held."""
    for mb in range(min(warmup, microbatches)):
        yield Act("F", stage, mb)
    for mb in range(microbatches):
        yield Act("I", stage, mb)
        if mb >= lag:
            yield Act("W", stage, mb - lag)
        if mb + warmup < microbatches:
            yield Act("F", stage, mb + warmup)
    # with fewer micro-batches than the lag all of them are pending
    first_pending = max(microbatches - lag, 0)
    for mb in range(first_pending, microbatches):
        yield Act("W", stage, mb)
