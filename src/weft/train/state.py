"""Owns what of a training step lasts, and where each entry of it belongs: the same names and boxes under every layout.

    stored name                        what
    model/<parameter>                  its values, in the type that the optimizer moves
    optim/<kind of state>/<parameter>  what the optimizer remembers of it ("exp_avg", ...; "step" is a number, 0-dim)

A tied parameter goes by its owner's name. A parameter that is not trained (a router's bias) has no optimizer state.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.axes import Box, span
from weft.errors import CheckpointError, Fault
from weft.parallel.model.parallelize import ParallelModel, ParamShard
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.train.optim import NamedOptimizer, Optimizer
from weft.train.step import TrainStep

MODEL = "model"

SHARED_FROM = 2**14
"""Entries from which the ranks that hold copies write a part each; smaller ones are written by one of them."""


@dataclass(frozen=True)
class Part:
    """What one rank has of one parameter.

    Attributes:
        piece: geometry of what the rank's modules use.
        lo, hi: which entries of that, counted row by row, are in the tensors here.
        tensors: section ("model", "optim/exp_avg") -> those entries.
        numbers: section -> what is one number for the whole parameter.
        copies: ranks that hold the same entries.
        copy: place of this rank among them.
        is_alias: whether the same stands under its owner's name on another rank.
    """

    piece: ParamShard
    lo: int
    hi: int
    tensors: Mapping[str, Tensor]
    numbers: Mapping[str, Tensor]
    copies: int
    copy: int
    is_alias: bool

    @property
    def boxes(self) -> tuple[Box, ...]:
        """All entries here, as boxes in row-major order."""
        return self.piece.shard.boxes_of_range(self.lo, self.hi)

    @property
    def share(self) -> tuple[int, int]:
        """Which entries of the piece this rank writes, so that each is written by one rank: from, up to."""
        length = self.hi - self.lo
        if self.is_alias:
            return self.lo, self.lo
        if length < SHARED_FROM:
            writer = zlib.crc32(self.piece.owner.encode()) % self.copies
            return (self.lo, self.hi) if writer == self.copy else (self.lo, self.lo)
        start, stop = span(length, self.copies, self.copy)
        return self.lo + start, self.lo + stop

    @property
    def writes_numbers(self) -> bool:
        """Whether this rank writes the parameter's first entry."""
        start, stop = self.share
        return start == 0 and stop > 0 and self.piece.shard.holds_first_entry


def parts_of_step(step: TrainStep) -> Iterator[Part]:
    """What this rank has: the values that the optimizer moves, what it remembers of them, and what is not trained."""
    trained = {name for name in step.grads.sharded_params if step.model.params[name].requires_grad}
    for part in parts_of_model(step.model, step.grads):
        name = part.piece.name
        if name in trained:
            state = named(step.optimizer).state[name]
            moved = {f"optim/{key}": value for key, value in state.items() if value.ndim}
            numbers = {f"optim/{key}": value for key, value in state.items() if not value.ndim}
            yield Part(**{**vars(part), "tensors": {**part.tensors, **moved}, "numbers": numbers})
        else:
            yield part


def parts_of_model(model: ParallelModel, grads: GradientReducer | None = None) -> Iterator[Part]:
    """The values alone: those that `grads` has the optimizer move, or spreads over ranks, or else the parameters themselves."""
    tensors = {**grads.sharded_params, **grads.frozen_shards} if grads else {}
    ranges, spread = (grads.shard_ranges, grads.shard_axes) if grads else ({}, {})
    for name, param in model.params.items():
        if name in tensors:
            lo, hi = ranges[name]
            if lo < hi:
                yield _part(model, name, tensors[name], lo=lo, hi=hi, spread=spread.get(name, ()))
        elif not (param.requires_grad and grads):
            yield _part(model, name, param, lo=0, hi=param.numel())


def names_of_step(step: TrainStep) -> frozenset[str]:
    """Stored names of all that stands on this rank, also of what others hold of it under ZeRO."""
    keys = named(step.optimizer).fresh_state(torch.empty(1))
    owners = {name: piece.owner for name, piece in step.model.shards.items()}
    trained = [owner for name, owner in owners.items() if step.model.params[name].requires_grad]
    values = {f"{MODEL}/{owner}" for owner in owners.values()}
    return frozenset(values | {f"optim/{key}/{owner}" for key in keys for owner in trained})


def named(optimizer: Optimizer) -> NamedOptimizer:
    """The optimizer as one whose state goes by parameter name.

    Raises:
        CheckpointError: its state goes by position or tensor, as in torch's own.
    """
    if isinstance(optimizer, NamedOptimizer):
        return optimizer
    got, need = type(optimizer).__qualname__, "a weft.train.optim.NamedOptimizer"
    raise CheckpointError(Fault("optim", "an optimizer whose state has no parameter names cannot be saved", got, need))


def _part(model: ParallelModel, name: str, tensor: Tensor, *, lo: int, hi: int, spread: tuple[str, ...] = ()) -> Part:
    piece, comm = model.shards[name], model.comm
    copied = tuple(axis for axis, _ in comm.mesh.axes if axis not in ("pp", *piece.shard_axes, *spread))
    return Part(
        piece=piece,
        lo=lo,
        hi=hi,
        tensors={MODEL: tensor},
        numbers={},
        copies=comm.degree(copied),
        copy=comm.index(copied),
        is_alias=any(link.name == name and not link.is_owner for link in model.cross_stage_ties),
    )
