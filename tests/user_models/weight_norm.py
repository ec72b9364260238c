"""A user's model of weight-normed linears (torch.nn.utils.parametrizations) that mixes tokens without attention."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    vocab: int = 256


class NormedLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up = weight_norm(nn.Linear(c.dim, 2 * c.dim))
        self.down = weight_norm(nn.Linear(2 * c.dim, c.dim))

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def blocks(c):
    chain = {"embed": nn.Embedding(c.vocab, c.dim)}
    for i in range(c.layers):
        chain[f"layer{i}"] = NormedLayer(c)
    chain["head"] = nn.Linear(c.dim, c.vocab)
    return chain


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.bias": (None,),
    "layer*.parametrizations.weight.original?": (None, None),
    "head.weight": ("vocab", "embed"),
    "head.bias": ("vocab",),
}
