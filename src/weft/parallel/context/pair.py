"""Owns keys and values (or their gradients) of one rank as one flat tensor, which travels as it is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """Keys and values end to end; `keys` and `values` are views into `line`."""

    line: Tensor
    keys_shape: tuple[int, ...]
    values_shape: tuple[int, ...]

    @staticmethod
    def of(k_BSGK: Tensor, v_BSGW: Tensor) -> Pair:
        """A copy of both."""
        line = torch.cat((k_BSGK.reshape(-1), v_BSGW.reshape(-1)))
        return Pair(line, tuple(k_BSGK.shape), tuple(v_BSGW.shape))

    @cached_property
    def keys(self) -> Tensor:
        """keys_BSGK."""
        return self.line[: prod(self.keys_shape)].view(self.keys_shape)

    @cached_property
    def values(self) -> Tensor:
        """values_BSGW."""
        return self.line[prod(self.keys_shape) :].view(self.values_shape)

    @property
    def columns(self) -> int:
        """Number of tokens."""
        return self.keys_shape[1]

    def shaped(self, line: Tensor) -> Pair:
        """Another line, read as this one is."""
        return Pair(line, self.keys_shape, self.values_shape)

    def zeros(self, dtype: torch.dtype) -> Pair:
        """Zeros of another type, read as this one is."""
        return self.shaped(torch.zeros_like(self.line, dtype=dtype))

    def add(self, columns: slice, keys: Tensor, values: Tensor) -> None:
        """Add to some columns of both."""
        self.keys[:, columns] += keys
        self.values[:, columns] += values


def wide(dtype: torch.dtype) -> torch.dtype:
    """The type in which sums over blocks are made: float32 at least."""
    return torch.promote_types(dtype, torch.float32)
