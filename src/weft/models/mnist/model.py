"""The blocks of the image classifiers: fully connected layers and convolutions, each with its ReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.batch import Batch
from weft.models.common.decoder import chain_blocks
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


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    if cfg.arch == "mlp":
        return _mlp_blocks(cfg)
    return _conv_blocks(cfg)


def _mlp_blocks(cfg: Config) -> dict[str, nn.Module]:
    num_pixels = cfg.image_size**2
    return chain_blocks(
        FlatEmbed(num_pixels, cfg.dim),
        [FlatLayer(cfg.dim, cfg.ffn) for _ in range(cfg.layers)],
        FlatHead(cfg.dim, cfg.classes),
    )


def _conv_blocks(cfg: Config) -> dict[str, nn.Module]:
    num_pixels = cfg.pooled_size**2
    return chain_blocks(
        ConvEmbed(cfg.dim),
        [ConvLayer(cfg.dim) for _ in range(cfg.layers)],
        ConvHead(cfg.dim * num_pixels, ffn=cfg.ffn, classes=cfg.classes),
    )
