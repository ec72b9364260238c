"""Layouts with any optimizer of the config, compared with one device; what they send for matrices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.matrix.layouts import LR, Case, batches, build_case, subject_of
from tests.one_device import check_records, micro_batches, records_of
from weft.comm.comm import Comm
from weft.comm.observe import Counter
from weft.config.schema import OptimConfig
from weft.testing import run_ranks
from weft.train.optim import NamedOptimizer, make_optimizer, matrices
from weft.train.step import TrainStep


def check(case: Case, optim: OptimConfig) -> None:
    """Assert that a layout's numbers are those of one device."""
    rates = {"lr": LR, "warmup": 0, "clip": case.clip}
    subject = subject_of(case, values={"optim": optim.model_copy(update=rates)})
    check_records(subject, records_of(subject))


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
