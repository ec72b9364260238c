"""Bytes of the tensors that autograd keeps for a backward, and whether there is room for more of them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class KeptGraphs:
    """Counts what graphs keep, each storage once.

    Args:
        most_bytes: up to which there is room for more; the graph that crosses it is kept whole.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.num_bytes = 0
        self._counted: set[int] = set()

    @property
    def has_room(self) -> bool:
        """Whether another graph is kept."""
        return self.num_bytes < self.most_bytes

    @contextmanager
    def count(self) -> Iterator[None]:
        """Count what the operations in the block keep."""

        def pack(saved: Tensor) -> Tensor:
            storage = saved.untyped_storage()
            # Kept storages are alive until their backward, so no address is used twice before it.
            if storage.data_ptr() not in self._counted:
                self._counted.add(storage.data_ptr())
                self.num_bytes += storage.nbytes()
            return saved

        if "torch._dynamo" in sys.modules:  # a block compiles parts of itself: never this
            pack = torch.compiler.disable(pack)
        with saved_tensors_hooks(pack, _unchanged):
            yield


def _unchanged(saved: Tensor) -> Tensor:
    return saved
