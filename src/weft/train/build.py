"""Owns the step from a description to parts that run: the model of a plan, and what a run config says of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from weft.checkpoint.source import Source
from weft.comm.comm import Comm
from weft.config.run import Run, plan_of
from weft.core.model_config import ModelConfig
from weft.data.dataset import open_validation
from weft.data.samples import Samples
from weft.layout.plan import Plan
from weft.models import FAMILIES, Family
from weft.models.common.lora import adapted
from weft.parallel.model.parallelize import ParallelModel, materialize_params, parallelize
from weft.train.evaluate import Evaluation
from weft.train.feed import Feed
from weft.train.meta_init import skeleton
from weft.train.optim import Optimizer, make_optimizer, matrices
from weft.train.start import source_of, start_from
from weft.train.step import TrainStep


def family_of(run: Run) -> Family:
    """The family of the run's model, with adapters where it has some."""
    return adapted(FAMILIES[run.model.name], run.lora)


def build_model(
    family: Family, config: ModelConfig, plan: Plan, comm: Comm, *, seed: int, source: Source | None = None
) -> ParallelModel:
    """This rank's part of the model; the whole model is never in memory.

    Parameters have their starting values, but where they come on demand (ZeRO 3): there `model.materialize` gives them.

    Args:
        source: holds starting values; what it does not hold is drawn.
    """
    blocks = skeleton(lambda: family.blocks(config))
    model = parallelize(blocks, plan, comm, axes=family.AXES, ties=family.ties(config))
    dtype: torch.dtype = getattr(torch, plan.params)
    stored = frozenset(source.shapes) if source else frozenset()

    def start(names: Sequence[str]) -> None:
        drawn = [name for name in names if model.shards[name].owner not in stored]
        materialize_params(model, family.init(config), seed=seed, device=comm.device, dtype=dtype, names=drawn)
        if source:
            read = [name for name in names if model.shards[name].owner in stored]
            start_from(source, model, read, device=comm.device, dtype=dtype)

    if plan.zero < 3:
        start(tuple(model.params))
    return replace(model, materialize=start)


def build_step(run: Run, comm: Comm) -> TrainStep:
    """The training step that `run` describes, as this rank plays it."""
    plan = plan_of(run)
    model = build_model(family_of(run), run.model, plan, comm, seed=run.seed, source=source_of(run))

    decayed = matrices(model.params)

    def optimizer(tensors: Mapping[str, Tensor]) -> Optimizer:
        return make_optimizer(tensors, run.optim, decay_names=decayed)

    return TrainStep(model, make_optimizer=optimizer, clip=run.optim.clip)


def build_feed(run: Run, comm: Comm, samples: Samples) -> Feed:
    """This rank's micro-batches of every step."""
    return Feed(
        samples,
        global_size=run.batch.global_size,
        micro_size=run.batch.micro_size,
        seed=run.seed,
        index=comm.index(("dp", "ep")),
        degree=comm.degree(("dp", "ep")),
        device=comm.device,
        later=run.model.reads_later_targets,
        context_index=comm.index("cp"),
        context_degree=comm.degree("cp"),
    )


def build_evaluation(run: Run, model: ParallelModel) -> Evaluation | None:
    """What evaluates the model between steps; None where the run does not ask for it."""
    if not run.eval.every:
        return None
    feed = build_feed(run, model.comm, open_validation(run.data, run.model, source=run.eval.source))
    return Evaluation(model, feed, most_batches=run.eval.batches)
