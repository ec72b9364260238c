"""Layouts with any optimizer of the config, compared with torch's optimizers on one device."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tests.matrix.layouts import LR, SEED, TOLERANCE, Case, batches, build_case, on_one_device
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.config.schema import OptimConfig
from weft.models import FAMILIES
from weft.prove.layout import micro_batches, run_layout
from weft.prove.oracle import one_device
from weft.prove.trace import RankTrace, StepTrace, TensorDifference, differences, uncovered
from weft.testing import run_ranks
from weft.train.optim import NamedOptimizer, make_optimizer, matrices
from weft.train.reference_optimizer import ReferenceOptimizer, reference_optimizer
from weft.train.step import TrainStep


@cache
def truth(case: Case, text: str) -> tuple[StepTrace, ...]:
    """One device with torch's optimizers."""
    optim = OptimConfig.model_validate_json(text)

    def optimizer(tensors: Mapping[str, Tensor], decayed: Collection[str]) -> ReferenceOptimizer:
        return reference_optimizer(optim, tensors, decay_names=decayed)

    return one_device(
        FAMILIES[case.family],
        case.config,
        batches(case),
        seed=SEED,
        dtype=torch.float64,
        optimizer=optimizer,
        clip=case.clip,
        lr=LR,
    )


def on_layout(case: Case, optim: OptimConfig) -> Sequence[RankTrace]:
    """All ranks of a layout, in threads."""

    def rank(comm: Comm) -> RankTrace:
        return run_layout(
            FAMILIES[case.family],
            case.config,
            batches(case),
            plan=case.plan,
            comm=comm,
            seed=SEED,
            optimizer=lambda tensors, decayed: make_optimizer(tensors, optim, decay_names=decayed),
            lr=LR,
        )

    return run_ranks(case.mesh, rank)


def check(case: Case, optim: OptimConfig) -> TensorDifference:
    """Assert that a layout's numbers are those of one device; the largest difference."""
    right = truth(on_one_device(case), optim.model_dump_json())
    ranks = on_layout(case, optim)
    assert not uncovered(right[0].params, ranks)
    found = list(differences(right, ranks, lr=LR))
    worst = max(found, key=lambda each: each.relative)
    assert worst.relative <= TOLERANCE, f"{case}: {worst}"
    return worst


@dataclass(frozen=True)
class Sent:
    """What a rank sends in one step."""

    counted: int
    stated: int


def sent_for_matrices(case: Case, optim: OptimConfig) -> Sequence[Sent]:
    """Bytes that the exchange of matrices sends on each rank: counted, and as the optimizer states."""

    def rank(comm: Comm) -> Sent:
        model = build_case(case, comm)
        decayed = matrices(model.params)
        step = TrainStep(
            model,
            make_optimizer=lambda tensors: make_optimizer(tensors, optim, decay_names=decayed),
            clip=case.clip,
        )
        batch = batches(case)[0]
        step(micro_batches(batch, case.plan, comm.rank), lr=LR)
        assert isinstance(step.optimizer, NamedOptimizer)
        counter = Counter()
        comm.observers = (counter,)
        step.optimizer.step()
        stated = sum(each.sent_bytes for each in step.optimizer.matrix_traffic())
        counted = counter.total().sent_bytes
        return Sent(counted, stated)

    return run_ranks(case.mesh, rank)
