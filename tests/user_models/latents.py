"""Perceiver's way: a few learned latents attend to the image's pixels, then to each other."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    image_size: int = 28
    classes: int = 10
    latents: int = 6
    dim: int = 16
    heads: int = 2
    depth: int = 2


def attend(q, k, v, size):
    q, k, v = (t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class CrossAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(c.latents, c.dim))
        self.pixel, self.place = nn.Linear(1, c.dim), nn.Embedding(c.image_size**2, c.dim)
        self.q, self.k, self.v = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(3))
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.size = c.dim // c.heads

    def forward(self, images):
        pixels = images.flatten(1)[..., None].to(self.latents.dtype) / 255
        tokens = self.pixel(pixels) + self.place.weight
        latents = self.latents.expand(len(images), -1, -1)
        q, k, v = self.q(latents), self.k(tokens), self.v(tokens)
        return latents + self.o(attend(q, k, v, self.size))


class SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.q, self.k, self.v = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(3))
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.up, self.down = nn.Linear(c.dim, 2 * c.dim), nn.Linear(2 * c.dim, c.dim)
        self.size = c.dim // c.heads

    def forward(self, x):
        y = self.norm(x)
        x = x + self.o(attend(self.q(y), self.k(y), self.v(y), self.size))
        return x + self.down(F.gelu(self.up(x)))


class Mean(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Linear(c.dim, c.classes)

    def forward(self, x):
        return self.proj(x.mean(dim=1))


def blocks(c):
    layers = {f"layer{i}": SelfAttention(c) for i in range(c.depth)}
    return {"cross": CrossAttention(c), **layers, "mean": Mean(c)}


AXES = {
    "cross.latents": (None, "embed"),
    "cross.pixel.weight": ("embed", None),
    "cross.pixel.bias": ("embed",),
    "cross.place.weight": (None, "embed"),
    "*.[qkv].weight": ("heads", "embed"),
    "*.o.weight": ("embed", "heads"),
    "layer*.norm.*": (None,),
    "layer*.up.weight": ("ffn", "embed"),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
    "mean.proj.weight": ("classes", "embed"),
    "mean.proj.bias": ("classes",),
}
