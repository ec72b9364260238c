"""Train one rank of a layout on given whole batches and record what it computes, by global parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.dimension import position_axes, sequence_axes
from weft.core.model_config import ModelConfig
from weft.data.order import Ints
from weft.data.samples import SampleArrays
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import Batch
from weft.prove.oracle import OptimizerOf
from weft.prove.trace import RankTrace, StepTrace
from weft.train.build import build_model
from weft.train.data_loader import DataLoader
from weft.train.optim import matrices
from weft.train.step import StepReport, TrainStep

SAMPLE_FIELDS = ("inputs", "targets", "positions", "documents")


class GivenSamples:
    """The sequences of given whole batches as samples, in their order: those of step 0, then of
    step 1.
    """

    def __init__(self, steps: Sequence[Batch]) -> None:
        self.steps = tuple(steps)
        self.num_samples = sum(len(batch.inputs) for batch in self.steps)

    def at(self, places: Ints, *, seed: int) -> Ints:
        """Sample i is at place i."""
        return places

    def read(self, samples: Ints) -> SampleArrays:
        """The samples with these numbers, flattened to one batch dimension."""
        numbers = torch.from_numpy(samples.ravel())
        fields: dict[str, Any] = {}
        for name in SAMPLE_FIELDS:
            parts = [getattr(batch, name) for batch in self.steps]
            if parts[0] is not None:
                fields[name] = torch.cat(parts)[numbers].numpy()
        return SampleArrays(**fields)

    def place(self, sample: int) -> dict[str, object]:
        """Its number."""
        return {"sample": sample}

    def facts(self) -> dict[str, object]:
        """Number of samples."""
        return {"samples": self.num_samples}


def micro_batches(
    batch: Batch,
    plan: Plan,
    rank: int,
) -> list[Batch]:
    """This rank's micro-batches of a step's whole batch, as training loads them."""
    loader = _loader(
        [batch],
        plan,
        rank,
        device=torch.device("cpu"),
    )
    return loader.batches(0)


def _loader(
    steps: Sequence[Batch],
    plan: Plan,
    rank: int,
    *,
    device: torch.device,
) -> DataLoader:
    mesh = plan.mesh
    return DataLoader(
        GivenSamples(steps),
        global_size=plan.global_size,
        micro_size=plan.micro_size,
        seed=0,
        index=mesh.index(rank, sequence_axes()),
        degree=mesh.degree(sequence_axes()),
        device=device,
        later=steps[0].later_targets is not None,
        context_index=mesh.index(rank, position_axes()),
        context_degree=mesh.degree(position_axes()),
    )


def run_layout(
    family: Family,
    config: ModelConfig,
    steps: Sequence[Batch],
    *,
    plan: Plan,
    comm: Comm,
    seed: int,
    optimizer: OptimizerOf,
    lr: float,
) -> RankTrace:
    """Train this rank's shards on the whole batches, one per step, and record everything."""
    model = build_model(
        family,
        config,
        plan,
        comm,
        seed=seed,
    )
    decay_names = matrices(model.params)
    train = TrainStep(
        model,
        make_optimizer=lambda tensors: optimizer(tensors, decay_names),
        clip=plan.clip,
    )
    traces = []
    loader = _loader(
        steps,
        plan,
        comm.rank,
        device=comm.device,
    )
    for step in range(len(steps)):
        report = train(loader.batches(step), lr=lr)
        traces.append(_trace(train, report))
    shards = {param.owner: param.shard for param in model.shards.values()}
    return RankTrace(plan.mesh.coord_text(comm.rank), shards, tuple(traces))


def _trace(train: TrainStep, report: StepReport) -> StepTrace:
    return StepTrace(
        loss=report.loss,
        grad_norm=report.grad_norm,
        grads=_by_owner(train, train.grads.full_gradients()),
        params=_by_owner(train, train.grads.full_parameters()),
    )


def _by_owner(train: TrainStep, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the owner's name of tied parameters."""
    return {train.model.shards[name].owner: tensor for name, tensor in tensors.items()}
