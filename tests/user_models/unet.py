"""A convolutional U-Net that removes noise: blocks hand on the image and the features that later blocks read."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

import weft


@dataclass(frozen=True)
class Config:
    dim: int = 8
    size: int = 8
    norm: str = "group"  # or batch


def INPUTS(c):
    image = weft.InputSpec((1, c.size, c.size))
    return {"image": image, "noise": image}


class Conv(nn.Module):
    def __init__(self, into, out, norm):
        super().__init__()
        self.norm = nn.BatchNorm2d(into) if norm == "batch" else nn.GroupNorm(1, into)
        self.conv = nn.Conv2d(into, out, 3, padding=1)

    def forward(self, x):
        return F.silu(self.conv(self.norm(x)))


class Embed(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(1, c.dim, 3, padding=1)

    def forward(self, image, batch):
        return self.conv((image + batch.fields["noise"]).to(self.conv.weight.dtype))


class Down(nn.Module):
    def __init__(self, dim, norm):
        super().__init__()
        self.conv = Conv(dim, 2 * dim, norm)

    def forward(self, x):
        x, *skips = x if isinstance(x, tuple) else (x,)
        return (F.avg_pool2d(self.conv(x), 2), x, *skips)


class Up(nn.Module):
    def __init__(self, dim, norm):
        super().__init__()
        self.conv = Conv(3 * dim, dim, norm)

    def forward(self, x):
        x, skip, *skips = x
        y = self.conv(torch.cat((F.interpolate(x, scale_factor=2.0), skip), 1))
        return (y, *skips) if skips else y


class Loss(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(c.dim, 1, 1)

    def forward(self, x, batch):
        return (self.conv(x) - batch.fields["noise"]).square().mean((1, 2, 3)).sum()


def blocks(c):
    downs = {f"down{i}": Down(2**i * c.dim, c.norm) for i in range(2)}
    ups = {f"up{i}": Up(2**i * c.dim, c.norm) for i in (1, 0)}
    return {"embed": Embed(c), **downs, **ups, "loss": Loss(c)}


AXES = {"*conv.weight": (None,) * 4, "*.bias": (None,), "*.norm.weight": (None,)}
