"""Rewards of the answers of a step or an evaluation: means of chosen and rejected ones, margins, accuracies, as TRL logs them.

Note [Rewards]
    The reward of an answer is beta S, in losses without a reference model beta M (see
    Note [Pair losses] in models/common/pair_losses.py), of a reward model its score. Means are over
    all pairs, with KTO over the answers that are desired and over the others. The loss adds up each
    micro-batch; under cp, where each rank has the sums of whole answers, its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.dimension import replicated_axes
from weft.models.common.preference import NUM_REWARD_SUMS, PreferenceLoss
from weft.parallel.zero.fixed_order import exact_sums


@dataclass(frozen=True)
class Rewards:
    """Means over the answers of a step; None where there are none, or no pairs.

    Attributes:
        margins: of chosen answers minus that of rejected ones.
        accuracies: share of pairs whose chosen answer has the larger reward.
        z0: of KTO, where replicas train apart the mean; None without.
    """

    chosen: float | None
    rejected: float | None
    margins: float | None
    accuracies: float | None
    z0: float | None = None

    @classmethod
    def of_sums(cls, sums: Sequence[float]) -> Rewards:
        """Rewards from `reward_sums` over all ranks, and z0, if there is one, behind them."""
        chosen, rejected, num_chosen, num_rejected, num_right, num_pairs, *z0 = sums
        mean = chosen / num_chosen if num_chosen else None
        other = rejected / num_rejected if num_rejected else None
        margins = None if mean is None or other is None else mean - other
        accuracies = num_right / num_pairs if num_pairs else None
        return cls(mean, other, margins, accuracies, z0[0] if z0 else None)

    def fields(self) -> dict[str, float]:
        """Fields of an event."""
        means = {f"rewards_{name}": mean for name, mean in asdict(self).items() if name != "z0"}
        return {
            name: value for name, value in {**means, "z0": self.z0}.items() if value is not None
        }


@contextmanager
def reward_sums_of(
    loss: PreferenceLoss | None, *, fixed_order: bool = False
) -> Iterator[list[Tensor]]:
    """The sums of the micro-batches whose loss is computed inside; with `fixed_order` those of each one,
    else their total. None where another rank has the loss.
    """
    found: list[Tensor] = []

    def add(sums: Tensor) -> None:
        if fixed_order or not found:
            found.append(sums)
        else:
            found[0] += sums

    if loss is not None:
        loss.on_rewards = add
    try:
        yield found
    finally:
        if loss is not None:
            loss.on_rewards = None


def rank_sums(comm: Comm, found: Sequence[Tensor], *, fixed_order: bool) -> Tensor:
    """What is added over ranks: this rank's part, float64; with `fixed_order` the total, on the first
    rank, whose bits do not depend on the ranks: then every rank must call it.
    """
    none = torch.zeros(NUM_REWARD_SUMS, dtype=torch.float64, device=comm.device)
    counted = found if comm.index(replicated_axes()) == 0 else ()
    if not fixed_order:
        return sum(counted, none)
    total = exact_sums(comm, counted, num_columns=NUM_REWARD_SUMS)
    return total if comm.rank == 0 else none
