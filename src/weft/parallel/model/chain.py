"""A model's plain blocks on the meta device, for traces; and replacing a module wherever it is used."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.models.common.batch import Batch
from weft.parallel.model.fingerprint import META, Fingerprint, TensorSpec, fingerprint
from weft.parallel.model.module_copy import copied_module

MAY_GATHER = "may_gather_sequence"
"""Class attribute of blocks that may work on whole sequences: see Note [Whole sequences] of tp, and
Note [Whole sequences under cp].
"""


@dataclass(frozen=True)
class PlainChain:
    """All blocks of a model before anything is sharded, and a batch that they can run on; both on
    the meta device.

    Attributes:
        repeats: name of a block -> name of an equal one. Both names have the same module here; in
            the model each has its own.
    """

    blocks: dict[str, nn.Module]
    batch: Batch
    repeats: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChainSnapshot:
    """Makes the `PlainChain` of a model as it was when the snapshot was taken.

    Attributes:
        fingerprint: of blocks and batch; None where they have none.
        copied: the chain, where it has no fingerprint to be made from.
        repeats: of the chain.
    """

    fingerprint: Fingerprint | None
    copied: PlainChain | None
    repeats: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, model: Mapping[str, nn.Module], batch: Batch, repeats: Mapping[str, str] | None = None
    ) -> ChainSnapshot:
        """A snapshot of all blocks, without the values of their tensors."""
        repeats = repeats or {}
        found = fingerprint((dict(model), batch))
        if found is not None:
            return cls(found, None, repeats)
        copied = PlainChain(copied_without_memory(model), batch, repeats)
        return cls(None, copied, repeats)

    def chain(self) -> PlainChain:
        """The chain; a new one on each call where there is a fingerprint."""
        if self.fingerprint is None:
            assert self.copied is not None, "a chain without a fingerprint is copied"
            return self.copied
        tensors = []
        for spec in self.fingerprint.tensors:
            assert isinstance(spec, TensorSpec), "tensors are described by their specs"
            tensors.append(spec.on_meta())
        blocks, batch = self.fingerprint.copy(tensors)
        return PlainChain(blocks, batch, self.repeats)


def copied_without_memory(model: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """A copy of the blocks on the meta device; tensors that are plain attributes are there, too."""
    copies: dict[int, Any] = {}
    for block in model.values():
        for module in block.modules():
            for tensor in _plain_tensors(module):
                copies[id(tensor)] = torch.empty_like(tensor, device=META)
        for param in block.parameters():
            values = torch.empty_like(param, device=META)
            copies[id(param)] = nn.Parameter(values, requires_grad=param.requires_grad)
    copied: dict[str, nn.Module] = {}
    for name, block in model.items():
        copied[name] = copied_module(block, copies)
    return copied


def _plain_tensors(module: nn.Module) -> Iterator[Tensor]:
    """A module's own buffers, and tensors that are plain attributes of it."""
    for value in vars(module).values():
        if isinstance(value, Tensor):
            yield value
    yield from module.buffers(recurse=False)


def replace_module(block: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """The block with `new` in place of `old`, under every name that it has, and where a list or a function
    of the user's calls `old`.
    """
    if all(module is not old for module in new.modules()):  # else `new` calls it
        vars(old)["forward"] = new
    if block is old:
        new._forward_pre_hooks.update(old._forward_pre_hooks)  # they decide what it is called with
        return new
    for parent in list(block.modules()):
        if parent is new:
            continue
        children = parent._modules
        for name, child in list(children.items()):
            if child is old:
                children[name] = new
    return block
