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
        self.proj = nn.Conv2d(1, c.dim, c.patch, stride=c.patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, c.dim))
        self.pos = nn.Parameter(0.02 * torch.randn((c.image_size // c.patch) ** 2 + 1, c.dim))

    def forward(self, images):
        x = self.proj(images.to(self.proj.weight.dtype) / 255).flatten(2).transpose(1, 2)
        return torch.cat((self.cls.expand(len(x), -1, -1), x), dim=1) + self.pos


class Encoder(nn.Module):
    def __init__(self, c, drop):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.q, self.k, self.v = (nn.Linear(c.dim, c.dim) for _ in range(3))
        self.o = nn.Linear(c.dim, c.dim)
        self.up, self.down = nn.Linear(c.dim, 2 * c.dim), nn.Linear(2 * c.dim, c.dim)
        self.attend = Attend(mask=AttentionMask(causal=False))
        self.size = c.dim // c.heads
        self.keep = 1 - drop

    def forward(self, x, batch):
        y = self.n1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.size)) for f in (self.q, self.k, self.v))
        x = x + self.keep * self.o(self.attend(q, k, v, batch).flatten(2))
        return x + self.keep * self.down(F.gelu(self.up(self.n2(x))))


class Classifier(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(c.dim), nn.Linear(c.dim, c.classes)

    def forward(self, x):
        return self.proj(self.norm(x[:, 0]))


def blocks(c):
    drops = [p.item() for p in torch.linspace(0, 0.0, c.depth)]
    layers = {f"block{i}": Encoder(c, drop) for i, drop in enumerate(drops)}
    return {"patches": Patches(c), **layers, "head": Classifier(c)}


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
