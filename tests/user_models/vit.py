"""A vision transformer: patches by a strided convolution, a class token, attention without a mask, stochastic depth off."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from weft import Attend, AttentionMask


@dataclass(frozen=True)
class Config:
    image_size: int = 28
    patch: int = 7
    classes: int = 10
    dim: int = 16
    heads: int = 4
    depth: int = 2


class Patches(nn.Module):
    def __init__(self, c):
        super().__init__()
        num_patches = (c.image_size // c.patch) ** 2
        self.proj = nn.Conv2d(1, c.dim, c.patch, stride=c.patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, c.dim))
        self.pos = nn.Parameter(0.02 * torch.randn(num_patches + 1, c.dim))

    def forward(self, images):
        brightness = images.to(self.proj.weight.dtype) / 255
        patches = self.proj(brightness).flatten(2)
        x = patches.transpose(1, 2)
        cls = self.cls.expand(len(x), -1, -1)
        return torch.cat((cls, x), dim=1) + self.pos


class Encoder(nn.Module):
    def __init__(self, c, drop):
        super().__init__()
        self.n1 = nn.LayerNorm(c.dim)
        self.n2 = nn.LayerNorm(c.dim)
        self.q = nn.Linear(c.dim, c.dim)
        self.k = nn.Linear(c.dim, c.dim)
        self.v = nn.Linear(c.dim, c.dim)
        self.o = nn.Linear(c.dim, c.dim)
        self.up = nn.Linear(c.dim, 2 * c.dim)
        self.down = nn.Linear(2 * c.dim, c.dim)
        self.attend = Attend(mask=AttentionMask(causal=False))
        self.size = c.dim // c.heads
        self.keep = 1 - drop

    def forward(self, x, batch):
        y = self.n1(x)
        by_head = (-1, self.size)
        q = self.q(y).unflatten(-1, by_head)
        k = self.k(y).unflatten(-1, by_head)
        v = self.v(y).unflatten(-1, by_head)
        attended = self.attend(q, k, v, batch)
        x = x + self.keep * self.o(attended.flatten(2))
        hidden = F.gelu(self.up(self.n2(x)))
        return x + self.keep * self.down(hidden)


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim)
        self.proj = nn.Linear(c.dim, c.classes)

    def forward(self, x):
        return self.proj(self.norm(x[:, 0]))


def blocks(c):
    chain = {"patches": Patches(c)}
    for i, drop in enumerate(torch.linspace(0, 0.0, c.depth)):
        chain[f"block{i}"] = Encoder(c, drop.item())
    chain["head"] = Classifier(c)
    return chain


AXES = {
    "patches.proj.weight": ("embed", None, None, None),
    "patches.proj.bias": ("embed",),
    "patches.cls": (None, None, "embed"),
    "patches.pos": ("pos", "embed"),
    "block*.n[12].*": (None,),
    "block*.[qkv].weight": ("heads", "embed"),
    "block*.[qkv].bias": ("heads",),
    "block*.o.weight": ("embed", "heads"),
    "block*.o.bias": ("embed",),
    "block*.up.weight": ("ffn", "embed"),
    "block*.up.bias": ("ffn",),
    "block*.down.weight": ("embed", "ffn"),
    "block*.down.bias": ("embed",),
    "head.norm.*": (None,),
    "head.proj.weight": ("classes", "embed"),
    "head.proj.bias": ("classes",),
}
