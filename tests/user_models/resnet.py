"""A small ResNet with BatchNorm in its layers, one of which has no momentum."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    image_size: int = 28
    classes: int = 10
    channels: int = 4
    layers: int = 3
    frozen: bool = False  # the running values of the stem


class Stem(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(1, c.channels, 3, stride=4, bias=False)
        self.norm = nn.BatchNorm2d(c.channels, momentum=0.3).train(not c.frozen)

    def forward(self, images):
        return self.norm(self.conv(images.to(self.conv.weight.dtype) / 255)).relu()


class Layer(nn.Module):
    def __init__(self, channels, momentum):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels, momentum=momentum)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + x)


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.BatchNorm1d(c.channels)
        self.linear = nn.Linear(c.channels, c.classes)

    def forward(self, x):
        return self.linear(self.norm(x.mean((2, 3))))


def blocks(c):
    layers = {f"layer{i}": Layer(c.channels, None if i == 0 else 0.1) for i in range(c.layers)}
    return {"stem": Stem(c), **layers, "head": Head(c)}


AXES = {
    "*conv*.weight": (None, None, None, None),
    "*norm*": (None,),
    "head.linear.weight": ("classes", None),
    "head.linear.bias": ("classes",),
}
