"""ALBERT's way: one layer is used by all depths, and a small embedding is projected to the width."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from weft import Attend


@dataclass(frozen=True)
class Config:
    depth: int = 3
    dim: int = 16
    small: int = 8
    heads: int = 4
    vocab: int = 256


class SharedLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.query, self.key, self.value = (nn.Linear(c.dim, c.dim) for _ in range(3))
        self.dense = nn.Linear(c.dim, c.dim)
        self.ffn, self.ffn_output = nn.Linear(c.dim, 2 * c.dim), nn.Linear(2 * c.dim, c.dim)
        self.attend = Attend()
        self.size = c.dim // c.heads

    def forward(self, x, batch):
        q, k, v = (f(x).unflatten(-1, (-1, self.size)) for f in (self.query, self.key, self.value))
        x = self.ln1(x + self.dense(self.attend(q, k, v, batch).flatten(2)))
        return self.ln2(x + self.ffn_output(F.gelu(self.ffn(x))))


def blocks(c):
    layer = SharedLayer(c)
    embed = nn.Sequential(nn.Embedding(c.vocab, c.small), nn.Linear(c.small, c.dim))
    return [
        ("embed", embed),
        *((f"layer{i}", layer) for i in range(c.depth)),
        ("head", nn.Linear(c.dim, c.vocab)),
    ]


AXES = {
    "embed.0.weight": ("vocab", "small"),
    "embed.1.*": (None,),
    "layer*.ln?.*": (None,),
    "layer*.query.weight": ("heads", "embed"),
    "layer*.key.weight": ("heads", "embed"),
    "layer*.value.weight": ("heads", "embed"),
    "layer*.query.bias": ("heads",),
    "layer*.key.bias": ("heads",),
    "layer*.value.bias": ("heads",),
    "layer*.dense.weight": ("embed", "heads"),
    "layer*.dense.bias": ("embed",),
    "layer*.ffn.weight": ("ffn", "embed"),
    "layer*.ffn.bias": ("ffn",),
    "layer*.ffn_output.weight": ("embed", "ffn"),
    "layer*.ffn_output.bias": ("embed",),
    "head.weight": ("vocab", "embed"),
    "head.bias": ("vocab",),
}
AXES["embed.1.weight"], AXES["embed.1.bias"] = ("embed", "small"), ("embed",)
del AXES["embed.1.*"]
