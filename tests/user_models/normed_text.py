"""A language model with BatchNorm, whose statistics are over the tokens of a micro-batch."""

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    vocab: int = 257


class Layer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        normed = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return x + self.down(self.up(normed).tanh())


def blocks(c):
    return {
        "embed": nn.Embedding(c.vocab, c.dim),
        **{f"layer{number}": Layer(c.dim) for number in range(c.layers)},
        "head": nn.Linear(c.dim, c.vocab),
    }


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.up.weight": ("ffn", "embed"),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
    "layer*.norm.*": ("norm",),
    "head.weight": ("vocab", "embed"),
    "head.bias": ("vocab",),
}
