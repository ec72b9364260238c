"""ZB-V: zero bubble in the memory of 1F1B, on a V of stages (Qi et al. 2023, arXiv 2401.10241; V-ZB in 2405.15362).

    table(ranks=2, chunks=2, microbatches=4)
    rank 0 │ 0a─ 1a─ 2a─ 0b─ I0b W0b 1b─ I1b W1b 3a─ I0a W0a 2b─ I2b W2b I1a W1a 3b─ I3b W3b I2a W2a I3a W3a ···
    rank 1 │ ··· 0a─ 0b─ 1a─ 1b─ I0b W0b 2a─ I0a W0a 2b─ I1b W1b 3a─ I1a W1a 3b─ I2b W2b I2a I3b I3a W2a W3b W3a

Rank r holds stage r (`a`) and stage 2p-1-r (`b`), so the gradient starts on the rank that feeds the
pipeline, and it comes back after 2p-1 forwards. Every rank holds at most p micro-batches (2p
chunks). From its first to its last action no rank idles where F = I = W and m >= 2p-1; where W <= F
<= I it is 2(p-1)(I-W), all three of a chunk. Rank r starts r forwards late.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.schedule.actions import Table
from weft.schedule.v_shaped import repeat_phases, v_shaped_table

NAME = "zbv"
CHUNKS = range(2, 3)


def table(ranks: int, chunks: int, microbatches: int) -> Table:
    """Two chunks a rank, in a V. Below 2 `ranks` - 1 micro-batches a row is that of 2 `ranks` - 1,
    less those not there.
    """
    total = max(microbatches, 2 * ranks - 1)
    return v_shaped_table(
        lambda rank: _row(rank, ranks, total), ranks=ranks, microbatches=microbatches
    )


def _row(rank: int, ranks: int, total: int) -> Iterator[str]:
    behind = ranks - rank
    phases = (
        ("Fa", 2 * behind - 1),  # until the first micro-batch has turned and is back
        ("Fb Fa", rank),
        ("Fb Ib Wb", behind),
        ("Fa Ia Wa Fb Ib Wb", total - ranks - behind + 1),
        ("Ia Wa Fb Ib Wb", behind - 1),  # no forwards of chunk a are left
        ("Ia Ib", rank),  # the ranks before wait for these: weight gradients later
        ("Ia Wa", behind),
        ("Wb", rank),
        ("Wa", rank),
    )
    return repeat_phases(phases)
