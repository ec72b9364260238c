"""Values for the parameters of one block on the meta device, for a trial run: drawn without building the rest of the model."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

PERIOD = 65_521
"""Drawn numbers that larger parameters repeat: a prime, so that no two rows are alike."""
MOST_TABLE_ENTRIES = 2**20
"""Embeddings with more entries have rows that overlap in memory: row i begins at number i."""
SEED = 0


def num_computed_entries(block: nn.Module) -> int:
    """Entries of its parameters without tables that are looked up only: what a run costs, and needs
    in memory.
    """
    tables = tables_of(block)
    return sum(param.numel() for param in block.parameters() if id(param) not in tables)


def kind_of(block: nn.Module) -> object:
    """Equal for blocks of the same modules and shapes."""
    modules = tuple((path, type(module)) for path, module in block.named_modules())
    return modules, tuple(param.shape for param in block.parameters())


def tables_of(block: nn.Module) -> frozenset[int]:
    """Identities of parameters that `nn.Embedding` looks up, and no other module has."""
    tables: set[int] = set()
    others: set[int] = set()
    for module in block.modules():
        known = tables if isinstance(module, nn.Embedding) else others
        known |= {id(param) for param in module._parameters.values()}
    return frozenset(tables - others)


def drawn_value(param: Tensor, *, dtype: torch.dtype, rows: int | None = None) -> Tensor:
    """A value for a parameter of this shape, whose rows and columns differ: about
    1 / sqrt(number of inputs) for a matrix, 0.5 to 1.5 for a vector.

    Args:
        rows: of a table that is looked up only; None: the parameter's.
    """
    generator = torch.Generator().manual_seed(SEED + param.dim())
    if not param.is_floating_point():
        return torch.zeros(param.shape, dtype=param.dtype)
    if rows is not None:
        width = math.prod(param.shape[1:])
        numbers = torch.randn(rows + width, generator=generator).to(dtype)
        return numbers.as_strided((rows, *param.shape[1:]), (1, *_strides(param.shape[1:])))
    num = param.numel()
    if param.dim() > 1:
        fan_in = math.prod(param.shape[1:])
        numbers = torch.randn(min(num, PERIOD), generator=generator) / math.sqrt(fan_in)
    else:
        numbers = 0.5 + torch.rand(min(num, PERIOD), generator=generator)
    value = torch.empty(num, dtype=dtype)
    for start in range(0, num, PERIOD):
        part = value[start : start + PERIOD]
        part.copy_(numbers[: len(part)])
    return value.view(param.shape)


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def fill(block: nn.Module, *, dtype: torch.dtype, known: Mapping[str, Tensor]) -> None:
    """Give the parameters of a block that are on the meta device values; what is one parameter stays
    one. Other floating-point tensors are cast.

    Args:
        known: values of some parameters, by their names in the block; others are drawn.
    """
    tables = tables_of(block)
    values = {id(param): known[name] for name, param in block.named_parameters() if name in known}
    made: dict[int, nn.Parameter] = {}
    old: list[Tensor] = []  # so that no other parameter gets the identity of one
    for module in list(block.modules()):
        for name, param in list(module._parameters.items()):
            if param is None or not param.is_meta:
                continue
            key = id(param)
            if key not in made:
                has_shared_rows = key in tables and param.numel() > MOST_TABLE_ENTRIES
                value = values.get(key)
                if value is None:
                    rows = len(param) if has_shared_rows else None
                    value = drawn_value(param, dtype=dtype, rows=rows)
                made[key] = nn.Parameter(value, requires_grad=False)
                old.append(param)
            setattr(module, name, made[key])
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)
