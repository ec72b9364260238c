"""Owns the proof of a config before it runs: its layout in threads against one device, in float64, tensor by tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.config.run import Run, plan_of
from weft.config.schema import PrecisionConfig
from weft.data.dataset import open_data
from weft.models.common.batch import Batch
from weft.prove.layout import run_layout
from weft.prove.oracle import one_device
from weft.prove.trace import Difference, Held, differences, uncovered
from weft.run.run_ranks import run_ranks
from weft.train.build import family_of
from weft.train.feed import samples_of, whole_batch
from weft.train.lr_schedule import learning_rate
from weft.train.optim import NamedOptimizer, make_optimizer

TOLERANCE = 1e-9
"""Relative, in float64, which rounds at 1e-16; a few steps of AdamW amplify that by some orders."""


@dataclass(frozen=True)
class Verdict:
    """What a proof found.

    Attributes:
        compared: losses, norms and tensors that were held against one device.
        largest: the largest difference of all.
        wrong: those beyond the tolerance, in the order in which they were computed.
        missing: parameters of which some entries lie on no rank.
    """

    compared: int
    largest: Difference
    wrong: tuple[Difference, ...]
    missing: tuple[str, ...]


def prove(run: Run, *, steps: int) -> Verdict:
    """Train `steps` steps of `run` on its layout, ranks as threads, and on one device; compare everything."""
    run = run.model_copy(update={"precision": PrecisionConfig(params="float64", compute="float64", reduce="float64")})
    family, plan = family_of(run), plan_of(run)
    batches = [_whole_batch(run, step) for step in range(steps)]
    lr = learning_rate(run.optim.warmup, run.optim, run.steps)

    def optimizer(tensors: Mapping[str, Tensor], decayed: Collection[str]) -> NamedOptimizer:
        return make_optimizer(tensors, run.optim, decay_names=decayed)

    truth = one_device(
        family,
        run.model,
        batches,
        seed=run.seed,
        dtype=torch.float64,
        optimizer=optimizer,
        clip=run.optim.clip,
        lr=lr,
    )

    def rank(comm: Comm) -> Held:
        return run_layout(
            family,
            run.model,
            batches,
            plan=plan,
            comm=comm,
            seed=run.seed,
            optimizer=optimizer,
            lr=lr,
        )

    ranks = run_ranks(plan.mesh, rank, timeout_s=3600)
    found = differences(truth, ranks, lr=lr)
    return Verdict(
        compared=len(found),
        largest=max(found, key=lambda difference: difference.relative),
        wrong=tuple(difference for difference in found if not difference.relative <= TOLERANCE),
        missing=tuple(uncovered(truth[0].params, ranks)),
    )


def _whole_batch(run: Run, step: int) -> Batch:
    samples = open_data(run.data, run.model)
    chosen = samples_of(samples, step, global_size=run.batch.global_size, seed=run.seed)
    return whole_batch(samples, chosen, later=run.model.reads_later_targets)
