"""Several tensors that a stage hands on to the next, packed into one that is sent and has one gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.parallel.autograd.tree import leaves_in, map_leaves, tensors_in


@dataclass(frozen=True)
class Packing:
    """Tensors in tuples, lists, dicts or data classes <-> one flat tensor.

    Tensors of `dtype` are its entries, and have gradients; the bytes of others (token ids, masks) are
    carried as they are, in as many entries as they need.

    Attributes:
        tree: what a stage returns, on the meta device.
        dtype: of the floating-point tensors.
    """

    tree: Any
    dtype: torch.dtype

    @property
    def length(self) -> int:
        """Entries of the flat tensor."""
        return sum(map(self._entries, tensors_in(self.tree)))

    def _entries(self, tensor: Tensor) -> int:
        num_bytes = tensor.numel() * tensor.dtype.itemsize
        return math.ceil(num_bytes / self.dtype.itemsize)

    def pack(self, tree: Any) -> Tensor:
        """flat[length]"""
        return torch.cat([self._flat(tensor) for tensor in tensors_in(tree)])

    def _flat(self, tensor: Tensor) -> Tensor:
        if tensor.dtype == self.dtype:
            return tensor.reshape(-1)
        # Bytes that are read as floating point may be NaN; they are copied and sent, never computed
        # with. Detached, so that their entries have no gradient.
        content = tensor.detach().contiguous().view(-1).view(torch.uint8)
        num_bytes = self._entries(tensor) * self.dtype.itemsize
        # Zeros behind the content: bytes that were never written would differ from run to run.
        padded = content.new_zeros(num_bytes)
        padded[: content.numel()] = content
        return padded.view(self.dtype)

    def unpack(self, flat: Tensor) -> Any:
        """The tree again; tensors of `dtype` are views."""
        start = 0

        def take(like: Tensor) -> Tensor:
            nonlocal start
            stop = start + self._entries(like)
            part = flat[start:stop]
            start = stop
            if like.dtype == self.dtype:
                return part.view(like.shape)
            num_bytes = like.numel() * like.dtype.itemsize
            content = part.detach().contiguous().view(torch.uint8)[:num_bytes]
            # The bytes may begin at a place that the wider type is not aligned to; a copy begins at 0.
            return content.clone().view(like.dtype).view(like.shape)

        return map_leaves(self.tree, Tensor, take)


def packing_of(output: Any, *, block: int) -> Packing | None:
    """How the output of a block is sent; None for one tensor, which is sent as it is.

    Raises:
        PlanError: it has no floating-point tensor, several types of them, or something that is no
            tensor.
    """
    if isinstance(output, Tensor):
        return None
    for leaf in leaves_in(output):
        if not isinstance(leaf, Tensor) and leaf is not None:
            _reject(
                block,
                "is neither a tensor nor None",
                type(leaf).__name__,
                "tensors in tuples or dicts",
            )
    dtypes = {tensor.dtype for tensor in tensors_in(output) if tensor.is_floating_point()}
    if len(dtypes) != 1:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "none"
        _reject(
            block, "is not of one floating-point type", names, "one, which carries the gradients"
        )
    (dtype,) = dtypes
    return Packing(output, dtype)


def _reject(block: int, what: str, got: str, need: str) -> None:
    fault = Fault(
        f"blocks[{block}]",
        f"an output that its stage hands on {what}",
        got=got,
        need=need,
        fix="return tensors, or join the block with the one after it",
    )
    raise PlanError(fault)


def call_block(block: nn.Module, x: Any) -> Any:
    """Call a block with what the block before it returned: a tuple is its arguments."""
    return block(*x) if isinstance(x, tuple) and not hasattr(x, "_fields") else block(x)
