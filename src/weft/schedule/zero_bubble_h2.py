"""ZB-H2: no rank idles between its first and its last action, for twice the activations (Qi et al. 2023, section 2.2).

    table(ranks=4, chunks=1, microbatches=8)
    rank 0 │ 0─ 1─ 2─ 3─ 4─ 5─ 6─ I0 W0 7─ I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 I7 W7 ········
    rank 1 │ ·· 0─ 1─ 2─ 3─ 4─ I0 5─ I1 6─ I2 W0 7─ I3 W1 I4 W2 I5 W3 I6 W4 I7 W5 W6 W7 ·····
    rank 2 │ ····· 0─ 1─ 2─ I0 3─ I1 4─ I2 5─ I3 6─ I4 W0 7─ I5 W1 I6 W2 I7 W3 W4 W5 W6 W7 ··
    rank 3 │ ········ 0─ I0 1─ I1 2─ I2 3─ I3 4─ I4 5─ I5 6─ I6 W0 7─ I7 W1 W2 W3 W4 W5 W6 W7

Forwards run until the first gradient comes back, and rank r delays 2r weight gradients: 2p-1
micro-batches are held. From its first to its last action a rank idles (p-1)(F+B-3W), with m >= 2p-1
and W no longer than F and I = B - W: not at all where F = I = W. What is left in the picture is the
slant: rank r starts and ends r forwards later than rank 0.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Act, Table
from weft.schedule.zero_bubble import delayed_row

NAME = "zero_bubble_h2"
CHUNKS = range(1, 2)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """One stage a rank; rank r runs 2 (ranks - r) - 1 forwards before its first backward, 2r weight
    gradients are delayed.
    """
    rows: list[Iterator[Act]] = []
    for rank in range(ranks):
        warmup = 2 * (ranks - rank) - 1
        rows.append(delayed_row(rank, microbatches, warmup=warmup, lag=2 * rank))
    return Table.of_rows(rows, stage_to_rank=range(ranks), microbatches=microbatches)
