"""What one rank computed in a training run: tensors with their places, partial gradients, losses, loads of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.observe import Operation
from weft.parallel.model.parallelize import ParamShard
from weft.prove.places import Place
from weft.prove.report import Phase
from weft.run.rank_status import Phase as StepPhase
from weft.train.training import Event


@dataclass(frozen=True)
class Site:
    """What a tensor is: step (from 1), phase, block, logical name, and micro-batch."""

    step: int
    phase: Phase
    block: str
    tensor: str
    parameter: str = ""
    micro_batch: int | None = None

    @staticmethod
    def of_number(step: int, phase: Phase, name: str) -> Site:
        """A number of a whole step, which belongs to no block."""
        return Site(step, phase, block="", tensor=name)

    @staticmethod
    def of_parameter(step: int, phase: Phase, parameter: str, tensor: str) -> Site:
        """A parameter, or a tensor of its shape: a gradient, a moment."""
        block = block_of(parameter)
        return Site(step, phase, block, tensor, parameter)


@dataclass(frozen=True)
class Observed:
    """A tensor of one rank, its place in the logical tensor, the operation before it, and the dtype
    in which the rank held it; of a reduced gradient that of the sum.
    """

    value: Tensor
    place: Place
    operation: Operation | None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class PartialGradient:
    """The gradient that this rank's own tokens gave a parameter in one step, over all micro-batches."""

    param: ParamShard
    value: Tensor
    operation: Operation | None


class BlockNumber(NamedTuple):
    """A loss of a block in one step."""

    step: int
    block: str
    name: str


class BlockLoad(NamedTuple):
    """The load of the experts of a block in one step."""

    step: int
    block: str


@dataclass
class RecordProgress:
    """Where a rank is in its run.

    Attributes:
        step: the newest that began, from 1; 0 before.
        block: the one that runs forward; "" between blocks and in other phases.
        has_begun: whether the model was built.
        is_restoring: whether a checkpoint is read back.
    """

    step: int = 0
    phase: StepPhase = "start"
    block: str = ""
    has_begun: bool = False
    is_restoring: bool = False


@dataclass
class RankRecord:
    """What one rank computed.

    Attributes:
        values: tensors by what they are.
        partial_gradients: (step, parameter) -> gradient before its reduction.
        sums: sums over this rank's own tokens: losses, extra losses.
        sum_types: number type of the terms of each.
        sum_operations: the operation before each of them.
        loads: tokens of this rank at each expert.
        shards: geometry of the parameters here.
        events: events of the run.
        norm_operations: the newest operation before the update, by step.
        rates: learning rates of the schedule, also of steps that are not trained; see `rated_steps`.
        progress: where the rank is, or was when an error ended its run.
        error: that error.
    """

    rank: int
    values: dict[Site, Observed] = field(default_factory=dict)
    partial_gradients: dict[tuple[int, str], PartialGradient] = field(default_factory=dict)
    sums: dict[BlockNumber, float] = field(default_factory=dict)
    sum_types: dict[BlockNumber, torch.dtype] = field(default_factory=dict)
    sum_operations: dict[BlockNumber, Operation | None] = field(default_factory=dict)
    loads: dict[BlockLoad, Tensor] = field(default_factory=dict)
    shards: Mapping[str, ParamShard] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    norm_operations: dict[int, Operation | None] = field(default_factory=dict)
    rates: dict[int, float] = field(default_factory=dict)
    progress: RecordProgress = field(default_factory=RecordProgress)
    error: BaseException | None = None


MOST_RATES = 64


def rated_steps(total: int) -> tuple[int, ...]:
    """The steps, from 1, whose learning rates are compared: all of a short schedule, of a long one
    some with equal distances and the last.
    """
    number = min(total, MOST_RATES)
    return tuple(total * (index + 1) // number for index in range(number))


def block_of(parameter: str) -> str:
    """The block of a parameter."""
    return parameter.partition(".")[0]
