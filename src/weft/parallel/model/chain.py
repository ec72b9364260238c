"""A model's plain blocks on the meta device, for traces; and replacing a module wherever it is used."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.batch import Batch

META = torch.device("meta")


@dataclass(frozen=True)
class PlainChain:
    """All blocks of a model before anything is sharded, and a batch that they can run on; both on
    the meta device.
    """

    blocks: dict[str, nn.Module]
    batch: Batch

    @classmethod
    def copied(cls, model: Mapping[str, nn.Module], batch: Batch) -> PlainChain:
        """A copy of the model's blocks without memory."""
        memo: dict[int, Any] = {}
        for block in model.values():
            for module in block.modules():
                plain = [value for value in vars(module).values() if isinstance(value, Tensor)]
                for tensor in (*plain, *module.buffers(recurse=False)):
                    memo[id(tensor)] = torch.empty_like(tensor, device=META)
            for param in block.parameters():
                memo[id(param)] = nn.Parameter(
                    torch.empty_like(param, device=META), requires_grad=param.requires_grad
                )
        return cls({name: copy.deepcopy(block, memo) for name, block in model.items()}, batch)


def replace_module(block: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The block with `new` in place of `old`, under every name that it has."""
    if block is old:
        return new
    for parent in list(block.modules()):
        for name, child in list(parent._modules.items()):
            if child is old and parent is not new:
                parent._modules[name] = new
    return block
