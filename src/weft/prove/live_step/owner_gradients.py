"""Gradients of the parameters of one block over the passes of a rank, and what noise changes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


class OwnerGradients:
    """Gradients of the parameters of one block: sums over plain passes, and of units with noise the
    difference that it makes.

    Args:
        dtype: in which they are summed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.sums: dict[str, Tensor] = {}
        self.spreads: dict[str, float] = {}
        self._plain: dict[str, Tensor] = {}
        self._dtype = dtype

    def add(self, grads: Mapping[str, Tensor | None], *, is_plain: bool) -> None:
        """Add the gradients of one pass; the noisy passes of a unit follow its plain one."""
        for owner, grad in grads.items():
            if grad is None:
                continue
            wide = grad.to(self._dtype)
            if is_plain:
                self._plain[owner] = wide
                before = self.sums.get(owner)
                self.sums[owner] = wide.clone() if before is None else before.add_(wide)
            elif owner in self._plain and wide.numel():
                distance = float((wide - self._plain[owner]).abs().max())
                self.spreads[owner] = max(self.spreads.get(owner, 0.0), distance)

    def drop(self, owner: str) -> None:
        """Free the memory of a gradient."""
        self.sums.pop(owner, None)
        self._plain.pop(owner, None)


def joined(
    owner: str,
    parts: Sequence[OwnerGradients],
    *,
    like: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The sum of the gradients that the blocks which use a parameter yield for it."""
    total = torch.zeros(like.shape, dtype=dtype, device=like.device)
    for part in parts:
        if owner in part.sums:
            total += part.sums[owner]
    return total


def summed_spread(owner: str, parts: Sequence[OwnerGradients]) -> float:
    """The sum of the differences that noise makes in each block which uses a parameter."""
    return sum(part.spreads.get(owner, 0.0) for part in parts)
