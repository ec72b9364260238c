"""A decoder with dropout of every kind that users write: modules, functions, attention, paths."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

import weft


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 4
    vocab: int = 256
    dropout: float = 0.2


class Tokens(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab, c.dim)
        self.drop = nn.Dropout(c.dropout)
        self.drop_tokens = nn.Dropout1d(c.dropout)

    def forward(self, ids):
        return self.drop_tokens(self.drop(self.tok(ids)))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.dim)
        self.norm2 = nn.LayerNorm(c.dim)
        self.q = nn.Linear(c.dim, c.dim)
        self.k = nn.Linear(c.dim, c.dim)
        self.v = nn.Linear(c.dim, c.dim)
        self.o = nn.Linear(c.dim, c.dim)
        self.up = nn.Linear(c.dim, 4 * c.dim)
        self.down = nn.Linear(4 * c.dim, c.dim)
        self.attend = weft.Attend(dropout=c.dropout)
        self.path = weft.DropPath(c.dropout)
        self.head_size = c.dim // c.heads
        self.dropout = c.dropout

    def forward(self, x, batch):
        y = self.norm1(x)
        q, k, v = (
            linear(y).unflatten(-1, (-1, self.head_size)) for linear in (self.q, self.k, self.v)
        )
        v = F.dropout(v, self.dropout, self.training)
        attended = self.attend(q, k, v, batch).flatten(2)
        x = x + self.path(F.dropout(self.o(attended), self.dropout, self.training, inplace=True))
        hidden = F.gelu(self.up(self.norm2(x)))
        rows = F.dropout(hidden.flatten(0, 1), self.dropout)
        out = F.dropout(self.down(rows.view(hidden.shape)), self.dropout)
        return x + weft.drop_path(out, self.dropout, self.training)


class Out(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.proj = nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, x):
        return self.proj(self.norm(x))


def blocks(c):
    layers = {f"layer{i}": Layer(c) for i in range(c.layers)}
    return {"tokens": Tokens(c), **layers, "out": Out(c)}


AXES = {
    "tokens.tok.weight": ("vocab", "embed"),
    "layer*.[qkv].weight": ("heads", "embed"),
    "layer*.[qkv].bias": ("heads",),
    "layer*.o.weight": ("embed", "heads"),
    "layer*.o.bias": ("embed",),
    "layer*.up.weight": ("ffn", "embed"),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
    "*norm*": (None,),
    "out.proj.weight": ("vocab", "embed"),
}
