"""Owns the same steps under a layout: what each rank computed, by global name, ready to be held against one device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from weft.comm.comm import Comm
from weft.core.model_config import ModelConfig
from weft.data.order import layout_of
from weft.layout.plan import Plan
from weft.models import Family
from weft.models.common.batch import Batch
from weft.prove.oracle import OptimizerOf
from weft.prove.trace import Held, StepTrace
from weft.train.build import build_model
from weft.train.optim import matrices
from weft.train.step import StepReport, TrainStep


def micro_batches(batch: Batch, plan: Plan, rank: int) -> list[Batch]:
    """This rank's micro-batches of the step's whole batch."""
    data, size = plan.mesh.degree(("dp", "ep")), plan.micro_size
    samples = layout_of(
        np.arange(plan.global_size), index=plan.mesh.index(rank, ("dp", "ep")), degree=data, micro_size=size
    )
    held = batch.columns(index=plan.mesh.index(rank, "cp"), degree=plan.mesh.degree("cp"))
    return [held.rows(torch.from_numpy(rows)) for rows in samples]


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
) -> Held:
    """Train this rank's part of the model on the same whole batches and record everything."""
    model = build_model(family, config, plan, comm, seed=seed)
    decayed = matrices(model.params)
    train = TrainStep(model, make_optimizer=lambda tensors: optimizer(tensors, decayed), clip=plan.clip)
    traces = tuple(_record(train, train(micro_batches(batch, plan, comm.rank), lr=lr)) for batch in steps)
    shards = {piece.owner: piece.shard for piece in model.shards.values()}
    return Held(plan.mesh.coord_text(comm.rank), shards, traces)


def _record(train: TrainStep, report: StepReport) -> StepTrace:
    owner = {name: piece.owner for name, piece in train.model.shards.items()}
    return StepTrace(
        loss=report.loss,
        grad_norm=report.grad_norm,
        grads={owner[name]: gradient for name, gradient in train.grads.full_gradients().items()},
        params={owner[name]: value for name, value in train.grads.full_parameters().items()},
    )
