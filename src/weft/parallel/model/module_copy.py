"""Deep copies of modules, with those functions among their attributes that close over modules.

`self.mlpf = lambda x: m.c_proj(m.c_fc(x))` calls the module `m` of the block that was built, also in
a copy of the block, since `copy.deepcopy` takes a function as it is. A trace of the copy would
follow other modules than the copied ones.
"""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn


def copied_module(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy whose functions call the copied modules.

    Args:
        memo: as of `copy.deepcopy`.
    """
    for each in module.modules():
        for value in vars(each).values():
            # computed again in each forward, as the weight of `nn.utils.weight_norm`: torch copies no graph
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
    copied = copy.deepcopy(module, memo)
    for old, new in zip(module.modules(), copied.modules(), strict=True):
        for name, value in vars(old).items():
            if closes_over_modules(value):
                vars(new)[name] = _rebound(value, memo)
    return copied


def closes_over_modules(value: object) -> bool:
    """Whether a function reads a module or a tensor that it closes over, or another such function."""
    if not isinstance(value, FunctionType):
        return False
    return any(
        isinstance(content, (nn.Module, Tensor)) or closes_over_modules(content)
        for content in _contents(value)
    )


def _contents(function: FunctionType) -> list[Any]:
    cells = function.__closure__ or ()
    return [cell.cell_contents for cell in cells if cell != CellType()]  # one may be empty


def _rebound(function: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The function that closes over copies."""

    def copied(cell: CellType) -> CellType:
        if cell == CellType():
            return CellType()
        content = cell.cell_contents
        if closes_over_modules(content):
            return CellType(_rebound(content, memo))
        return CellType(copy.deepcopy(content, memo))

    cells = tuple(map(copied, function.__closure__ or ()))
    code, own_globals, name = function.__code__, function.__globals__, function.__name__
    rebound = FunctionType(code, own_globals, name, function.__defaults__, cells)
    rebound.__kwdefaults__ = function.__kwdefaults__
    return rebound
