"""What a pipeline stage sends to the next: one tensor as it is, or several as one, which has one gradient."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from weft.layout.plan import Plan


def sent_output(plan: Plan, stage: int, output: Any) -> Tensor:
    """What a stage sends of its output: tensors in a tuple or dict are columns of one tensor, whose
    rows are samples.
    """
    parts = plan.stages[stage].parts
    if not parts:
        sent: Tensor = output
        return sent
    tensors = _tensors(plan, stage, output)
    # The number of columns is computed: of a tensor without rows torch would not infer it.
    rows = [tensor.reshape(len(tensor), math.prod(tensor.shape[1:])) for tensor in tensors]
    return torch.cat(rows, dim=1)


def received_input(plan: Plan, stage: int, x: Tensor) -> Any:
    """The output of a stage, as its blocks returned it, from what it sent; tensors are views."""
    parts = plan.stages[stage].parts
    if not parts:
        return x
    shapes = plan.part_shapes(stage)
    columns = x.split([math.prod(shape[1:]) for shape in shapes], dim=1)
    tensors = [own.reshape(shape) for own, shape in zip(columns, shapes, strict=True)]
    names = [name for name, _ in parts]
    return dict(zip(names, tensors, strict=True)) if names[0] else tuple(tensors)


def output_shapes(plan: Plan, stage: int, output: Any) -> list[torch.Size]:
    """Shapes of the tensors that a stage hands on."""
    return [tensor.shape for tensor in _tensors(plan, stage, output)]


def _tensors(plan: Plan, stage: int, output: Any) -> list[Tensor]:
    parts = plan.stages[stage].parts
    return [output[key] for key in _keys(parts)] if parts else [output]


def _keys(parts: tuple[tuple[str, tuple[str | int, ...]], ...]) -> list[Any]:
    """Names of a dict's tensors, numbers of a tuple's."""
    return [name or number for number, (name, _) in enumerate(parts)]
