"""Tensors of the state dict of a pipeline's blocks, which every rank knows by key, shape and dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class StateEntry:
    """A tensor of the state dict of all blocks.

    Attributes:
        key: name of the block, and its key there.
    """

    key: str
    block: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def state_entries(blocks: Mapping[str, nn.Module]) -> tuple[StateEntry, ...]:
    """The tensors of all blocks, by name, in their order."""
    entries: list[StateEntry] = []
    for name, block in blocks.items():
        for key, value in tensors_of(block, prefix=f"{name}.").items():
            entry = StateEntry(key, name, tuple(value.shape), value.dtype)
            entries.append(entry)
    return tuple(entries)


def tensors_of(module: nn.Module, *, prefix: str) -> dict[str, Tensor]:
    """The parameters and buffers of a module's state dict."""
    found: dict[str, Tensor] = {
        key: value
        for key, value in module.state_dict(prefix=prefix, keep_vars=True).items()
        if isinstance(value, Tensor)
    }
    return found
