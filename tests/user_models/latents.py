"""A user's model as in Perceiver: a few learned latents attend to the image's pixels, then to each other."""

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
    def by_head(x):
        return x.unflatten(-1, (-1, size)).transpose(1, 2)

    out = F.scaled_dot_product_attention(by_head(q), by_head(k), by_head(v))
    return out.transpose(1, 2).flatten(2)


class CrossAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(c.latents, c.dim))
        self.pixel = nn.Linear(1, c.dim)
        self.place = nn.Embedding(c.image_size**2, c.dim)
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.size = c.dim // c.heads

    def forward(self, images):
        pixels = images.flatten(1)[..., None]
        brightness = pixels.to(self.latents.dtype) / 255
        tokens = self.pixel(brightness) + self.place.weight
        latents = self.latents.expand(len(images), -1, -1)
        q = self.q(latents)
        k = self.k(tokens)
        v = self.v(tokens)
        return latents + self.o(attend(q, k, v, self.size))


class SelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.up = nn.Linear(c.dim, 2 * c.dim)
        self.down = nn.Linear(2 * c.dim, c.dim)
        self.size = c.dim // c.heads

    def forward(self, x):
        y = self.norm(x)
        attended = attend(self.q(y), self.k(y), self.v(y), self.size)
        x = x + self.o(attended)
        hidden = F.gelu(self.up(x))
        return x + self.down(hidden)


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
