"""A small model whose attention normalises queries and keys over all heads, in which faults of their statistics are planted."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

import weft
from weft.models.common.batch import Batch


@dataclass(frozen=True)
class Config:
    """Sizes; `vocab` is of bytes."""

    layers: int = 3
    dim: int = 32
    heads: int = 4
    vocab: int = 256


class WideNormLayer(nn.Module):
    """x_BSD plus attention whose queries and keys are normalised before they are split into heads."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_size = dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(dim), nn.LayerNorm(dim)
        self.attend = weft.Attend()

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        q, k, v = self.q_norm(self.q(x)), self.k_norm(self.k(x)), self.v(x)
        q, k, v = (each.unflatten(-1, (-1, self.head_size)) for each in (q, k, v))
        change: Tensor = self.o(self.attend(q, k, v, batch).flatten(2))
        return x + change


def blocks(c: Config) -> dict[str, nn.Module]:
    """The chain, without its loss."""
    layers = {f"layer{number}": WideNormLayer(c.dim, c.heads) for number in range(c.layers)}
    return {"embed": nn.Embedding(c.vocab, c.dim), **layers, "head": nn.Linear(c.dim, c.vocab)}


AXES = {
    "embed.weight": (None, None),
    "layer*.[qkv].weight": ("heads", None),
    "layer*.[qk]_norm.*": ("heads",),
    "layer*.o.weight": (None, "heads"),
    "head.weight": (None, None),
    "head.bias": (None,),
}
