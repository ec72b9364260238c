"""Owns filling this rank's part of a model from stored tensors: each rank reads its own boxes, and nothing twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from weft.comm.comm import Comm
from weft.core.model import ModelConfig
from weft.core.plan import Plan
from weft.errors import CheckpointError, Fault
from weft.models import Family
from weft.parallel.model import ParallelModel, parallelize
from weft.save.source import Source
from weft.train.skeleton import skeleton


def load_model(family: Family, config: ModelConfig, source: Source, *, plan: Plan, comm: Comm) -> ParallelModel:
    """This rank's part of the stored model, in the plan's `compute`; the whole model is never in memory.

    Raises:
        CheckpointError: a tensor that is missing or has another shape; it names it.
    """
    blocks = skeleton(lambda: family.blocks(config))
    model = parallelize(blocks, plan, comm, axes=family.AXES, ties=family.ties(config))
    if faults := tuple(_faults(model, source)):
        raise CheckpointError(*faults[:MOST_FAULTS])
    dtype: torch.dtype = getattr(torch, plan.compute)
    for name, piece in model.pieces.items():
        value = source.read(piece.owner, piece.box).to(device=comm.device, dtype=dtype)
        torch.utils.swap_tensors(model.params[name], nn.Parameter(value, requires_grad=False))
    return model


MOST_FAULTS = 3


def _faults(model: ParallelModel, source: Source) -> Iterator[Fault]:
    for piece in model.pieces.values():
        stored = source.shapes.get(piece.owner)
        if stored is None:
            yield Fault(
                piece.owner, "is not among the stored tensors", fix="check that the model is the one that was saved"
            )
        elif tuple(stored) != piece.shape:
            yield Fault(piece.owner, "has another shape in the checkpoint", str(tuple(stored)), str(piece.shape))
