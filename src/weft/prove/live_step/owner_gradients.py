"""Gradients of the parameters of one block over the passes of a rank, and what noise changes in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.prove.live_step.entry_sums import compare


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
        sums = compare(noisy, plain)
        return GradientNoise(sums.largest, sums.length, abs(sums.product) / max(sums.norm, TINY))

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
        self._num_passes: Counter[str] = Counter()
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
                # Not in place: autograd may return one tensor for two parameters.
                self.sums[owner] = wide if before is None else before + wide
                self._num_passes[owner] += 1
            elif owner in self._plain and wide.numel():
                noise = GradientNoise.of(wide, self._plain[owner])
                self.noise[owner] = noise.max(self.noise.get(owner, NO_NOISE))

    def take(self, owner: str) -> Tensor | None:
        """The sum of a gradient, which the caller may change; it is kept no longer."""
        self._plain.pop(owner, None)
        total = self.sums.pop(owner, None)
        # The sum of one pass is still the tensor of autograd.
        is_of_one_pass = total is not None and self._num_passes[owner] == 1
        return total.clone() if total is not None and is_of_one_pass else total


def joined(
    owner: str, parts: Sequence[OwnerGradients], *, shape: tuple[int, ...], like: Tensor
) -> Tensor:
    """The sum of the gradients that the blocks which use a parameter yield for it.

    Args:
        like: has the device and dtype of a gradient.
    """
    total: Tensor | None = None
    for part in parts:
        found = part.take(owner)
        if found is not None:
            total = found if total is None else total.add_(found)
    return like.new_zeros(shape) if total is None else total


def summed_noise(owner: str, parts: Sequence[OwnerGradients]) -> GradientNoise:
    """The sum of what noise changes in each block which uses a parameter."""
    return sum((part.noise.get(owner, NO_NOISE) for part in parts), NO_NOISE)
