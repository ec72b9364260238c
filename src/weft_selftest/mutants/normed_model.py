"""A small model with BatchNorm, over all positions of a micro-batch, in which buffer faults are planted."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Config:
    """Sizes; `vocab` is of bytes."""

    layers: int = 3
    dim: int = 16
    vocab: int = 256


class NormedLayer(nn.Module):
    """x_BSD plus a function of its normalised features."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim, momentum=0.3)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        change: Tensor = self.down(F.gelu(self.up(normed)))
        return x + change


def blocks(c: Config) -> dict[str, nn.Module]:
    """The chain, without its loss."""
    layers = {f"layer{number}": NormedLayer(c.dim) for number in range(c.layers)}
    return {"embed": nn.Embedding(c.vocab, c.dim), **layers, "head": nn.Linear(c.dim, c.vocab)}


AXES = {
    "embed.weight": (None, None),
    "layer*.norm.*": (None,),
    "layer*.up.weight": ("ffn", None),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": (None, "ffn"),
    "layer*.down.bias": (None,),
    "head.weight": (None, None),
    "head.bias": (None,),
}
