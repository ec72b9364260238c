"""A user's model as in ALBERT: one layer is used at all depths, and a small embedding is projected to the width."""

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
        self.ln1 = nn.LayerNorm(c.dim)
        self.ln2 = nn.LayerNorm(c.dim)
        self.query = nn.Linear(c.dim, c.dim)
        self.key = nn.Linear(c.dim, c.dim)
        self.value = nn.Linear(c.dim, c.dim)
        self.dense = nn.Linear(c.dim, c.dim)
        self.ffn = nn.Linear(c.dim, 2 * c.dim)
        self.ffn_output = nn.Linear(2 * c.dim, c.dim)
        self.attend = Attend()
        self.size = c.dim // c.heads

    def forward(self, x, batch):
        by_head = (-1, self.size)
        q = self.query(x).unflatten(-1, by_head)
        k = self.key(x).unflatten(-1, by_head)
        v = self.value(x).unflatten(-1, by_head)
        attended = self.attend(q, k, v, batch)
        x = self.ln1(x + self.dense(attended.flatten(2)))
        hidden = F.gelu(self.ffn(x))
        return self.ln2(x + self.ffn_output(hidden))


def blocks(c):
    layer = SharedLayer(c)
    small = nn.Embedding(c.vocab, c.small)
    to_width = nn.Linear(c.small, c.dim)
    chain = [("embed", nn.Sequential(small, to_width))]
    for i in range(c.depth):
        chain.append((f"layer{i}", layer))
    head = nn.Linear(c.dim, c.vocab)
    chain.append(("head", head))
    return chain


AXES = {
    "embed.0.weight": ("vocab", "small"),
    "embed.1.weight": ("embed", "small"),
    "embed.1.bias": ("embed",),
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
