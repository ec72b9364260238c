"""DualPipeV: a V of stages run in pairs of a forward and a backward (DeepSeek-AI 2025, github.com/deepseek-ai/DualPipe).

    table(ranks=2, chunks=2, microbatches=4)
    rank 0 │ 0a─ 1a─ 2a─ 0b─ I0b W0b 1b─ 3a─ B1b──── 2b─ B0a──── B2b──── 3b─ ··· B1a──── B3b──── I2a W2a I3a W3a
    rank 1 │ ··· 0a─ 0b─ 1a─ 1b─ 2a─ B0b──── 2b─ B0a──── 3a─ B1b──── 3b─ B1a──── B2b──── B2a──── I3b I3a W3b W3a

Rank r holds stage r (`a`) and stage 2p-1-r (`b`). In a pair (`3a B1b`) forward and backward belong
to different micro-batches and chunks: what can run both at once hides the communication of one
behind the computation of the other. Every rank holds at most 2p+1 chunks, p + 1/2 micro-batches. A
rank idles at most (p-1)(F+B-2W) where pairs run one after the other, and (p-1)(F&B+B-3W) where a
pair takes F&B and is one, with m >= 2p, F = B-W >= W, all of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Table
from weft.schedule.v_shaped import repeat_phases, v_shaped_table

NAME = "dual_pipe_v"
CHUNKS = range(2, 3)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """Two chunks a rank, in a V. Below 2 `ranks` micro-batches a row is that of 2 `ranks`, less
    those that are not there.
    """
    total = max(microbatches, 2 * ranks)
    return v_shaped_table(
        lambda rank: _row(rank, ranks, total), ranks=ranks, microbatches=microbatches
    )


def _row(rank: int, ranks: int, total: int) -> Iterator[str]:
    behind = ranks - 1 - rank
    half, odd = divmod(rank + 1, 2)
    phases = (
        ("Fa", 2 * behind),
        ("Fa Fb", rank + 1),
        ("Ib W* Fb", behind),
        ("Fa Bb Fb Ba", total - ranks - behind),  # pairs, chunk against chunk
        ("Bb Fb Ba", behind),
        ("Bb Ba", half),
        ("Bb Ia", odd),  # from here on weight gradients wait: the ranks before need these gradients
        ("Ib Ia", half),
        ("W* Ia", behind),
        ("W*", rank + 1),
    )
    return repeat_phases(phases)
