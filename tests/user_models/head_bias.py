"""A user's model as in T5: a learned bias for each head and distance bucket, added by the block; scores are not scaled."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 4
    buckets: int = 8
    vocab: int = 256


class BiasedLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.RMSNorm(c.dim)
        self.norm2 = nn.RMSNorm(c.dim)
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.bias = nn.Parameter(0.1 * torch.randn(c.heads, c.buckets))
        self.wi = nn.Linear(c.dim, 32, bias=False)
        self.wo = nn.Linear(32, c.dim, bias=False)
        self.size = c.dim // c.heads

    def by_head(self, x):
        return x.unflatten(-1, (-1, self.size)).transpose(1, 2)

    def forward(self, x, batch):
        y = self.norm(x)
        q = self.by_head(self.q(y))
        k = self.by_head(self.k(y))
        v = self.by_head(self.v(y))
        positions = batch.positions[0]
        distance = positions[:, None] - positions
        bucket = distance.clamp(0, self.bias.shape[1] - 1)
        scores = q @ k.transpose(-1, -2) + self.bias[:, bucket]
        scores = scores.masked_fill(distance < 0, float("-inf"))
        attended = scores.softmax(-1) @ v
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        hidden = F.relu(self.wi(self.norm2(x)))
        return x + self.wo(hidden)


def blocks(c):
    chain = {"embed": nn.Embedding(c.vocab, c.dim)}
    for i in range(c.layers):
        chain[f"layer{i}"] = BiasedLayer(c)
    chain["head"] = nn.Linear(c.dim, c.vocab)
    return chain


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.norm*.weight": (None,),
    "layer*.[qkv].weight": ("heads", "embed"),
    "layer*.o.weight": ("embed", "heads"),
    "layer*.bias": ("heads", None),
    "layer*.wi.weight": ("ffn", "embed"),
    "layer*.wo.weight": ("embed", "ffn"),
    "head.weight": ("vocab", "embed"),
    "head.bias": ("vocab",),
}
