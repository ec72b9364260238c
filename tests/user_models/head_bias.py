"""T5's way: a learned bias for each head and distance bucket, computed by the block itself; no scale of the scores."""

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
        self.norm, self.norm2 = nn.RMSNorm(c.dim), nn.RMSNorm(c.dim)
        self.q, self.k, self.v = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(3))
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.bias = nn.Parameter(0.1 * torch.randn(c.heads, c.buckets))
        self.wi, self.wo = nn.Linear(c.dim, 32, bias=False), nn.Linear(32, c.dim, bias=False)
        self.size = c.dim // c.heads

    def forward(self, x, batch):
        y = self.norm(x)
        q, k, v = (
            f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q, self.k, self.v)
        )
        distance = batch.positions[0][:, None] - batch.positions[0]
        bucket = distance.clamp(0, self.bias.shape[1] - 1)
        scores = q @ k.transpose(-1, -2) + self.bias[:, bucket]
        scores = scores.masked_fill(distance < 0, float("-inf"))
        x = x + self.o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.wo(F.relu(self.wi(self.norm2(x))))


def blocks(c):
    layers = {f"layer{i}": BiasedLayer(c) for i in range(c.layers)}
    return {"embed": nn.Embedding(c.vocab, c.dim), **layers, "head": nn.Linear(c.dim, c.vocab)}


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
