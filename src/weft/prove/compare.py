"""Compare a layout with one device: train both for some steps in float64 and compare every tensor; ranks are threads."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.config.schema import OptimConfig
from weft.core.model_config import ModelConfig
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import Batch
from weft.prove.layout import run_layout
from weft.prove.oracle import one_device
from weft.prove.trace import RankTrace, TensorDifference, differences, uncovered
from weft.run.run_ranks import run_ranks
from weft.train.optim import NamedOptimizer, make_optimizer

TOLERANCE = 1e-9
"""Relative, in float64, which rounds at 1e-16; a few steps of AdamW amplify that by some orders of
magnitude.
"""

TIMEOUT_S = 3600.0


@dataclass(frozen=True)
class Verdict:
    """Result of a proof.

    Attributes:
        compared: number of losses, norms and tensors that were compared with one device.
        largest: the largest difference.
        wrong: differences beyond the tolerance, in order of computation.
        missing: parameters with entries that no rank holds.
    """

    compared: int
    largest: TensorDifference
    wrong: tuple[TensorDifference, ...]
    missing: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the layout computes what one device computes."""
        return not self.wrong and not self.missing


def prove_layout(
    family: Family,
    config: ModelConfig,
    batches: Sequence[Batch],
    *,
    plan: Plan,
    seed: int,
    optim: OptimConfig,
    lr: float,
) -> Verdict:
    """Train one step per whole batch on the plan's layout and on one device, and compare
    everything.

    Args:
        plan: with float64 as its dtypes.
        lr: learning rate of every step.
    """

    def optimizer(tensors: Mapping[str, Tensor], decay_names: Collection[str]) -> NamedOptimizer:
        return make_optimizer(tensors, optim, decay_names=decay_names)

    def rank(comm: Comm) -> RankTrace:
        return run_layout(
            family,
            config,
            batches,
            plan=plan,
            comm=comm,
            seed=seed,
            optimizer=optimizer,
            lr=lr,
        )

    truth = one_device(
        family,
        config,
        batches,
        seed=seed,
        dtype=torch.float64,
        optimizer=optimizer,
        clip=optim.clip,
        lr=lr,
    )
    ranks = run_ranks(plan.mesh, rank, timeout_s=TIMEOUT_S)
    found = differences(truth, ranks, lr=lr)
    return Verdict(
        compared=len(found),
        largest=max(found, key=lambda difference: difference.relative),
        wrong=tuple(difference for difference in found if not difference.relative <= TOLERANCE),
        missing=tuple(uncovered(truth[0].params, ranks)),
    )
