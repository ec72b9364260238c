"""Gradients of the parameters of one block over the passes of a rank, and what noise changes in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class GradientNoise:
    """What noise of one unit of rounding changes in the gradient of a micro-batch.

    Attributes:
        largest: largest absolute change of an entry.
        length: Euclidean norm of the change.
        along: length of its projection on the gradient.
    """

    largest: float = 0.0
    length: float = 0.0
    along: float = 0.0

    @staticmethod
    def of(noisy: Tensor, plain: Tensor) -> GradientNoise:
        """The change from one gradient to another."""
        change = (noisy - plain).flatten()
        along = float(change @ plain.flatten()) / max(norm(plain), TINY)
        return GradientNoise(largest(change), norm(change), abs(along))

    def max(self, other: GradientNoise) -> GradientNoise:
        """The larger of each."""
        return GradientNoise(
            max(self.largest, other.largest),
            max(self.length, other.length),
            max(self.along, other.along),
        )

    def __add__(self, other: GradientNoise) -> GradientNoise:
        return GradientNoise(
            self.largest + other.largest, self.length + other.length, self.along + other.along
        )

    def times(self, factor: float) -> GradientNoise:
        """That of the gradient times a factor."""
        return GradientNoise(self.largest * factor, self.length * factor, self.along * factor)


def norm(x: Tensor) -> float:
    """The Euclidean norm, summed in float64 without a copy in float64."""
    return float(torch.linalg.vector_norm(x, dtype=torch.float64))


def largest(x: Tensor) -> float:
    """The largest absolute value."""
    return float(torch.linalg.vector_norm(x, torch.inf)) if x.numel() else 0.0


NO_NOISE = GradientNoise()
TINY = 1e-300


class OwnerGradients:
    """Gradients of the parameters of one block: sums over plain passes, and of units with noise the
    difference that it makes.

    Args:
        dtype: in which they are summed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.sums: dict[str, Tensor] = {}
        self.noise: dict[str, GradientNoise] = {}
        self._plain: dict[str, Tensor] = {}
        self._dtype = dtype

    def add(self, grads: Mapping[str, Tensor | None], *, is_plain: bool, has_noisy: bool) -> None:
        """Add the gradients of one pass; the noisy passes of a unit follow its plain one.

        Args:
            has_noisy: whether the unit has noisy passes.
        """
        for owner, grad in grads.items():
            if grad is None:
                continue
            wide = grad.to(self._dtype)
            if is_plain:
                if has_noisy:
                    self._plain[owner] = wide
                before = self.sums.get(owner)
                # A copy: autograd may return one tensor for two parameters.
                self.sums[owner] = wide.clone() if before is None else before.add_(wide)
            elif owner in self._plain and wide.numel():
                noise = GradientNoise.of(wide, self._plain[owner])
                self.noise[owner] = noise.max(self.noise.get(owner, NO_NOISE))

    def drop(self, owner: str) -> None:
        """Free the memory of a gradient."""
        self.sums.pop(owner, None)
        self._plain.pop(owner, None)


def joined(
    owner: str, parts: Sequence[OwnerGradients], *, like: Tensor, dtype: torch.dtype
) -> Tensor:
    """The sum of the gradients that the blocks which use a parameter yield for it."""
    sums = [part.sums[owner] for part in parts if owner in part.sums]
    if not sums:
        return torch.zeros(like.shape, dtype=dtype, device=like.device)
    total, *others = sums
    for other in others:
        total += other
    return total


def summed_noise(owner: str, parts: Sequence[OwnerGradients]) -> GradientNoise:
    """The sum of what noise changes in each block which uses a parameter."""
    return sum((part.noise.get(owner, NO_NOISE) for part in parts), NO_NOISE)
