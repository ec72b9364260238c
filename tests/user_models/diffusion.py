"""A diffusion transformer with adaptive norms (DiT, Peebles and Xie 2023) on images, noise, times and labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import weft


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 32
    heads: int = 4
    size: int = 8
    patch: int = 2
    classes: int = 10


def INPUTS(c):
    image = weft.InputSpec((3, c.size, c.size))
    label = weft.InputSpec((), "int64", below=c.classes)
    return {"image": image, "noise": image, "time": weft.InputSpec(), "label": label}


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.proj = nn.Conv2d(3, c.dim, c.patch, stride=c.patch)
        self.pos = nn.Parameter(0.02 * torch.randn((c.size // c.patch) ** 2, c.dim))

    def forward(self, image, batch):
        t = batch.fields["time"].sigmoid()[:, None, None, None]
        noisy = (1 - t) * image + t * batch.fields["noise"]
        return self.proj(noisy.to(self.proj.weight.dtype)).flatten(2).transpose(1, 2) + self.pos


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(c.dim, elementwise_affine=False) for _ in range(2))
        self.label, self.time = nn.Embedding(c.classes, c.dim), nn.Linear(1, c.dim)
        self.scale, self.shift = (nn.Linear(c.dim, 2 * c.dim) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(c.dim, c.dim) for _ in range(4))
        self.up, self.down = nn.Linear(c.dim, 4 * c.dim), nn.Linear(4 * c.dim, c.dim)
        self.head_size = c.dim // c.heads

    def forward(self, x, batch):
        time = batch.fields["time"].to(x.dtype)[:, None]
        condition = F.silu(self.label(batch.fields["label"]) + self.time(time))[:, None]
        scale1, scale2 = self.scale(condition).chunk(2, -1)
        shift1, shift2 = self.shift(condition).chunk(2, -1)
        y = self.norm1(x) * (1 + scale1) + shift1
        q, k, v = (f(y).unflatten(-1, (-1, self.head_size)) for f in (self.q, self.k, self.v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.norm2(x) * (1 + scale2) + shift2
        return x + self.down(F.gelu(self.up(y)))


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(c.dim), nn.Linear(c.dim, 3 * c.patch**2)
        self.side, self.patch = c.size // c.patch, c.patch

    def forward(self, x):
        x = self.proj(self.norm(x)).unflatten(1, (self.side, self.side))
        x = x.unflatten(-1, (3, self.patch, self.patch)).permute(0, 3, 1, 4, 2, 5)
        return x.flatten(4).flatten(2, 3)


class Loss(nn.Module):
    """The squared error of the predicted velocity, summed over samples."""

    def forward(self, x, batch):
        velocity = batch.fields["noise"] - batch.inputs
        return (x - velocity).square().mean((1, 2, 3)).sum()


def blocks(c):
    layers = {f"layer{i}": Layer(c) for i in range(c.layers)}
    return {"embed": Embed(c), **layers, "head": Head(c), "loss": Loss()}


AXES = {
    "embed.proj.weight": (None, None, None, None),
    "embed.proj.bias": (None,),
    "embed.pos": (None, None),
    "layer*.label.weight": (None, None),
    "layer*.time.weight": (None, None),
    "layer*.time.bias": (None,),
    "layer*.s[ch]*.weight": (None, None),
    "layer*.s[ch]*.bias": (None,),
    "layer*.[qkv].weight": ("heads", None),
    "layer*.[qkv].bias": ("heads",),
    "layer*.out.weight": (None, "heads"),
    "layer*.up.weight": ("ffn", None),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": (None, "ffn"),
    "layer*.[od]*.bias": (None,),
    "head.norm.*": (None,),
    "head.proj.weight": (None, None),
    "head.proj.bias": (None,),
}
