"""A `Source` of tensors in memory, for tests that read stored parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.axes import Box


@dataclass(frozen=True)
class Memory:
    """A `Source` that holds its tensors."""

    tensors: Mapping[str, Tensor]

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype

    def read(self, name: str, box: Box) -> Tensor:
        return self.tensors[name][box.slices].clone()
