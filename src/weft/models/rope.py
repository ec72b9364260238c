"""Owns rotary position embedding (RoFormer, Su et al. 2021) with the frequency scaling of LLaMA 3.1.

See Note [Rotary layout] at the end.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Llama3Scaling:
    """Stretches long wavelengths so that a model of `original_context` tokens reads `factor` times as many."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int

    def __call__(self, frequencies: Tensor) -> Tensor:
        """Wavelengths under context/high stay, those over context/low grow by `factor`, a ramp lies between."""
        turns = self.original_context / (2 * math.pi / frequencies)
        ramp = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        keep = ramp.clamp(0.0, 1.0)
        return (1 - keep) * frequencies / self.factor + keep * frequencies


class Rope(nn.Module):
    """Rotates queries and keys by angles that grow with the position; holds no tensor, so no cast can spoil it."""

    def __init__(self, head_size: int, *, theta: float, scaling: Llama3Scaling | None = None) -> None:
        super().__init__()
        self.head_size, self.theta, self.scaling = head_size, theta, scaling

    def forward(self, positions_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of each token's angles, [B, S, 1, K/2], float32 under every precision policy."""
        angles = positions_BS[..., None, None].float() * self.frequencies(positions_BS.device)
        return angles.cos(), angles.sin()

    def frequencies(self, device: torch.device) -> Tensor:
        """Radians per token of each pair of features, [K/2] float32, from the fastest to the slowest."""
        exponents = torch.arange(0, self.head_size, 2, device=device).float() / self.head_size
        frequencies = 1.0 / self.theta**exponents
        return self.scaling(frequencies) if self.scaling else frequencies


def rotate(x_BSHK: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """`x` with each pair (feature i, feature i + K/2) turned; computed in float32 at least."""
    cos, sin = turn
    left, right = x_BSHK.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_BSHK.dtype)


# Note [Rotary layout]
# Feature i is paired with feature i + K/2, as in Hugging Face's weights; Meta's own files pair 2i with 2i + 1, which is
# the same model with the rows of q and k permuted within each head. Frequencies and angles are float32 even in a
# float64 model: so do Meta and Hugging Face, and so a model is the same function under every precision. They are
# computed where they are used (K/2 numbers): a table in a buffer would be cast by `.to(bfloat16)` and left empty by
# `to_empty`.
