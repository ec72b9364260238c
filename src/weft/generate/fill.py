"""Owns a model for generation: this rank's part of it, filled from stored tensors; each rank reads its own boxes."""

from __future__ import annotations

import torch
from torch import nn

from weft.checkpoint.source import Source
from weft.comm.comm import Comm
from weft.core.model_config import ModelConfig
from weft.layout.plan import Plan
from weft.models import Family
from weft.parallel.model.parallelize import ParallelModel, parallelize
from weft.train import checkpoint
from weft.train.meta_init import skeleton


def load_model(family: Family, config: ModelConfig, source: Source, *, plan: Plan, comm: Comm) -> ParallelModel:
    """This rank's part of the stored model, in the plan's `compute`; the whole model is never in memory.

    Raises:
        CheckpointError: a tensor that is missing, damaged or of another shape; it names it.
    """
    blocks = skeleton(lambda: family.blocks(config))
    model = parallelize(blocks, plan, comm, axes=family.AXES, ties=family.ties(config))
    dtype: torch.dtype = getattr(torch, plan.compute)
    for param in model.params.values():
        room = nn.Parameter(torch.empty(param.shape, device=comm.device, dtype=dtype), requires_grad=False)
        torch.utils.swap_tensors(param, room)  # the modules that hold it keep the same object
    checkpoint.load_model(model, source)
    return model
