"""Owns the one way in which stored tensors are read: whole shapes by name, and any box of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from weft.core.axes import Box


class Source(Protocol):
    """Stored tensors by global name (`layer17.attn.q.weight`): a section of a checkpoint, a Hugging Face folder, memory."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Whole shape of every tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """As stored."""
        ...

    def read(self, name: str, box: Box) -> Tensor:
        """Entries of `box`, in its shape, as stored, in memory of their own on the CPU; only what is needed is read.

        Raises:
            CheckpointError: what is read is not what was written, naming file and tensor.
        """
        ...
