"""Train one rank of a layout on given whole batches and record what it computes, by global parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.dimension import position_axes, sequence_axes
from weft.core.model_config import ModelConfig
from weft.data.order import layout_of
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import Batch
from weft.prove.oracle import OptimizerOf
from weft.prove.trace import RankTrace, StepTrace
from weft.train.build import build_model
from weft.train.optim import matrices
from weft.train.step import StepReport, TrainStep


def micro_batches(batch: Batch, plan: Plan, rank: int) -> list[Batch]:
    """This rank's micro-batches of a step's whole batch."""
    mesh = plan.mesh
    sequences, positions = sequence_axes(), position_axes()
    samples = layout_of(
        np.arange(plan.global_size),
        index=mesh.index(rank, sequences),
        degree=mesh.degree(sequences),
        micro_size=plan.micro_size,
    )
    shard = batch.columns(
        index=mesh.index(rank, positions),
        degree=mesh.degree(positions),
    )
    return [shard.rows(torch.from_numpy(rows)) for rows in samples]


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
    model = build_model(family, config, plan, comm, seed=seed)
    decay_names = matrices(model.params)
    train = TrainStep(
        model,
        make_optimizer=lambda tensors: optimizer(tensors, decay_names),
        clip=plan.clip,
    )
    traces = []
    for batch in steps:
        report = train(micro_batches(batch, plan, comm.rank), lr=lr)
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
