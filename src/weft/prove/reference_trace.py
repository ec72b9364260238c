"""What a one-device reference computes: whole tensors and numbers by step, phase and logical name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from weft.prove.report import Phase


class TensorKey(NamedTuple):
    """A logical tensor of one step."""

    step: int
    phase: Phase
    tensor: str

    @staticmethod
    def of_gradient(step: int, phase: Phase, parameter: str) -> TensorKey:
        """The gradient of a parameter, before ("backward") or after ("reduce") its reduction."""
        return TensorKey(step, phase, f"{parameter} gradient")

    @staticmethod
    def as_used(step: int, parameter: str) -> TensorKey:
        """A parameter as the forward of the step uses it."""
        return TensorKey(step, "forward", f"{parameter} as used")


@dataclass
class ReferenceTrace:
    """What one device computes.

    Attributes:
        blocks: names of the blocks, in order.
        keeps_tensors: whether tensors are kept; else only numbers.
        values: whole tensors and numbers; loads under "forward".
        types: number types of losses.
        lrs: learning rate by step.
        skipped: steps whose gradients overflowed in float16, which change nothing.
    """

    blocks: tuple[str, ...]
    keeps_tensors: bool = True
    values: dict[TensorKey, Tensor] = field(default_factory=dict)
    types: dict[TensorKey, torch.dtype] = field(default_factory=dict)
    lrs: dict[int, float] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)

    def keep(self, step: int, phase: Phase, name: str, tensor: Tensor) -> None:
        """Keep a copy of a tensor."""
        if self.keeps_tensors:
            self.values[TensorKey(step, phase, name)] = tensor.detach().clone()

    def keep_number(self, step: int, phase: Phase, name: str, value: float) -> None:
        """Keep a number."""
        number = torch.tensor(float(value), dtype=torch.float64)
        self.values[TensorKey(step, phase, name)] = number
