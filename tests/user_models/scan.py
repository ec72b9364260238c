"""A user's model as in Mamba: a gated selective scan along the sequence in place of attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    inner: int = 32
    vocab: int = 256


class ScanLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.RMSNorm(c.dim)
        self.x = nn.Linear(c.dim, c.inner)
        self.z = nn.Linear(c.dim, c.inner)
        self.dt = nn.Linear(c.dim, c.inner)
        rates = torch.linspace(1, 4, c.inner)
        self.log_rate = nn.Parameter(torch.log(rates))
        self.skip = nn.Parameter(torch.ones(c.inner))
        self.out = nn.Linear(c.inner, c.dim)

    def forward(self, hidden):
        y = self.norm(hidden)
        x = self.x(y)
        gate = F.silu(self.z(y))
        step = F.softplus(self.dt(y))
        decay = torch.exp(-step * self.log_rate.exp())
        state = torch.zeros_like(x[:, 0])
        states = []
        for place in range(x.shape[1]):
            kept = decay[:, place] * state
            state = kept + step[:, place] * x[:, place]
            states.append(state)
        scanned = torch.stack(states, dim=1) + self.skip * x
        return hidden + self.out(scanned * gate)


def blocks(c):
    chain = {"embed": nn.Embedding(c.vocab, c.dim)}
    for i in range(c.layers):
        chain[f"layer{i}"] = ScanLayer(c)
    chain["head"] = nn.Linear(c.dim, c.vocab)
    return chain


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.norm.weight": (None,),
    "layer*.[xz].weight": ("ffn", "embed"),
    "layer*.[xz].bias": ("ffn",),
    "layer*.dt.weight": ("ffn", "embed"),
    "layer*.dt.bias": ("ffn",),
    "layer*.log_rate": ("ffn",),
    "layer*.skip": ("ffn",),
    "layer*.out.weight": ("embed", "ffn"),
    "layer*.out.bias": ("embed",),
    "head.weight": ("vocab", "embed"),
    "head.bias": ("vocab",),
}
