"""The blocks of the image classifiers: fully connected layers and convolutions, each with its ReLU."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.batch import Batch
from weft.models.common.decoder import chain_builders
from weft.models.common.lazy_blocks import Builder, Builders, build_all
from weft.models.mnist.config import Config


def brightness(images_B1HW: Tensor, dtype: torch.dtype) -> Tensor:
    """Pixels from 0 to 1; bytes are scaled, floats are taken as they are."""
    pixels = images_B1HW.to(dtype)
    if images_B1HW.is_floating_point():
        return pixels
    return pixels / 255


class FlatEmbed(nn.Module):
    """Images to vectors_BD."""

    def __init__(self, num_pixels: int, dim: int) -> None:
        super().__init__()
        self.proj = nn.Linear(num_pixels, dim)

    def forward(self, images_B1HW: Tensor, batch: Batch) -> Tensor:
        dtype = self.proj.weight.dtype
        pixels = brightness(images_B1HW, dtype)
        x_BD = self.proj(pixels.flatten(1))
        return F.relu(x_BD)


class FlatLayer(nn.Module):
    """relu(down(relu(up(x)))): two linears, so that tensor parallelism cuts the features between
    them.
    """

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn)
        self.down = nn.Linear(ffn, dim)

    def forward(self, x_BD: Tensor, batch: Batch) -> Tensor:
        hidden = F.relu(self.up(x_BD))
        return F.relu(self.down(hidden))


class FlatHead(nn.Module):
    """Vectors to one logit a class."""

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.proj = nn.Linear(dim, classes)

    def forward(self, x_BD: Tensor, batch: Batch) -> Tensor:
        logits_BV: Tensor = self.proj(x_BD)
        return logits_BV


class ConvEmbed(nn.Module):
    """Images to channels at half the resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, channels, kernel_size=3, padding=1)

    def forward(self, images_B1HW: Tensor, batch: Batch) -> Tensor:
        dtype = self.conv.weight.dtype
        pixels = brightness(images_B1HW, dtype)
        features = F.relu(self.conv(pixels))
        return F.max_pool2d(features, 2)


class ConvLayer(nn.Module):
    """A convolution that keeps channels and resolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, kernel_size=3, padding=1)

    def forward(self, x_BCHW: Tensor, batch: Batch) -> Tensor:
        return F.relu(self.conv(x_BCHW))


class ConvHead(nn.Module):
    """Halves the resolution, then two linears to one logit a class."""

    def __init__(self, num_features: int, *, ffn: int, classes: int) -> None:
        super().__init__()
        self.up = nn.Linear(num_features, ffn)
        self.down = nn.Linear(ffn, classes)

    def forward(self, x_BCHW: Tensor, batch: Batch) -> Tensor:
        pooled = F.max_pool2d(x_BCHW, 2)
        features = pooled.flatten(1)
        hidden = F.relu(self.up(features))
        logits_BV: Tensor = self.down(hidden)
        return logits_BV


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; equal layers have the same one."""
    if cfg.arch == "mlp":
        num_pixels = cfg.image_size**2
        embed: Builder = partial(FlatEmbed, num_pixels, cfg.dim)
        layer: Builder = partial(FlatLayer, cfg.dim, cfg.ffn)
        head: Builder = partial(FlatHead, cfg.dim, cfg.classes)
    else:
        num_pixels = cfg.pooled_size**2
        embed = partial(ConvEmbed, cfg.dim)
        layer = partial(ConvLayer, cfg.dim)
        head = partial(ConvHead, cfg.dim * num_pixels, ffn=cfg.ffn, classes=cfg.classes)
    return chain_builders(embed, [layer] * cfg.layers, head)


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return build_all(builders(cfg))
