"""A small MobileNet: depthwise and pointwise convolutions with BatchNorm, residuals, dropout before the head."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    image_size: int = 28
    classes: int = 10
    channels: int = 4
    expansion: int = 2
    p: float = 0.2


class Conv(nn.Module):
    def __init__(self, inputs, outputs, size=1, **options):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, size, padding=size // 2, bias=False, **options)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x):
        return self.norm(self.conv(x))


class Stem(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.first = Conv(1, c.channels, 3, stride=4)

    def forward(self, images):
        return self.first(images.to(self.first.conv.weight.dtype) / 255).relu()


class InvertedResidual(nn.Module):
    def __init__(self, c):
        super().__init__()
        wide = c.channels * c.expansion
        self.expand, self.project = Conv(c.channels, wide), Conv(wide, c.channels)
        self.depthwise = Conv(wide, wide, 3, groups=wide)

    def forward(self, x):
        return x + self.project(F.relu6(self.depthwise(F.relu6(self.expand(x)))))


def blocks(c):
    head = nn.Sequential(
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(c.p), nn.Linear(c.channels, c.classes)
    )
    return {"stem": Stem(c), **{f"layer{i}": InvertedResidual(c) for i in range(3)}, "head": head}


AXES = {
    "*.conv.weight": (None,) * 4,
    "*.norm.*": (None,),
    "head.3.weight": ("classes", None),
    "head.3.bias": ("classes",),
}
