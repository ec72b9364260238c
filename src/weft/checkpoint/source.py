"""What stored tensors are read through, wherever they are stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from weft.core.axes import Box


class Source(Protocol):
    """Stored tensors by global name (`layer17.attn.q.weight`): a section of a checkpoint, a Hugging
    Face folder, memory.
    """

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The dtype in which a tensor is stored."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """The entries of `box`, in its shape and stored dtype, in new memory on the CPU; reads only
        what is needed.

        Raises:
            CheckpointError: the bytes are not those that were written; names file and tensor.
        """
        ...
