"""A language model whose blocks hand on the embeddings beside their own output."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from weft import Attend


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 32
    heads: int = 4
    vocab: int = 256


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab, c.dim)

    def forward(self, ids):
        x = self.tok(ids)
        return {"x": x, "first": x}


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.q, self.k, self.v, self.out = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(4))
        self.attend, self.head_size = Attend(), c.dim // c.heads

    def forward(self, streams, batch):
        x = streams["x"]
        y = self.norm(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head_size)) for f in (self.q, self.k, self.v))
        x = x + self.out(self.attend(q, k, v, batch).flatten(2))
        return {"x": x, "first": streams["first"]}


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(c.dim), nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, streams):
        return self.proj(self.norm(streams["x"] + streams["first"]))


def blocks(c):
    layers = {f"layer{i}": Layer(c) for i in range(c.layers)}
    return {"embed": Embed(c), **layers, "head": Head(c)}


AXES = {
    "embed.tok.weight": (None, None),
    "*norm.*": (None,),
    "layer*.[qkv].weight": ("heads", None),
    "layer*.out.weight": (None, "heads"),
    "head.proj.weight": ("vocab", None),
}
