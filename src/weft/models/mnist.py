"""Owns two small classifiers of grey images: an MLP and a conv net, as chains that a pipeline and tp can cut."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import NonNegativeInt, PositiveInt, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model import BlockSpec, Draw, ModelConfig, linear_flops

if TYPE_CHECKING:
    from torch import nn


class Config(ModelConfig):
    """The classifiers' shape; the defaults are mnist-mlp. `dim` counts the conv net's channels."""

    family: ClassVar[str] = "mnist"
    kind: ClassVar[Literal["tokens", "images"]] = "images"

    arch: Literal["mlp", "conv"] = "mlp"
    layers: NonNegativeInt = 2
    dim: PositiveInt = 128
    ffn: PositiveInt = 256
    classes: PositiveInt = 10
    image_size: PositiveInt = 28

    @field_validator("image_size")
    @classmethod
    def _conv_halves_twice(cls, image_size: int, info: ValidationInfo) -> int:
        if info.data.get("arch") == "conv" and image_size % 4:
            near = max(4, round(image_size / 4) * 4)
            raise ValueError(f'{image_size} is not divisible by 4, and arch "conv" halves it twice; try {near}')
        return image_size

    @property
    def pooled_size(self) -> int:
        """Height and width that the conv net's head flattens."""
        return self.image_size // 4

    def axis_sizes(self) -> dict[str, int]:
        return {"ffn": self.ffn}

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        embed, layer, head, hidden = self._mlp_costs() if self.arch == "mlp" else self._conv_costs()
        return (
            BlockSpec("embed", embed, hidden, is_layer=False),
            *(BlockSpec(f"layer{i}", layer, hidden, is_layer=True) for i in range(self.layers)),
            BlockSpec("head", head, ("batch", self.classes), is_layer=False),
            BlockSpec("loss", 0.0, (), is_layer=False),
        )

    def _mlp_costs(self) -> tuple[float, float, float, tuple[str | int, ...]]:
        embed = linear_flops(1, self.image_size**2 * self.dim)
        layer, head = linear_flops(1, 2 * self.dim * self.ffn), linear_flops(1, self.dim * self.classes)
        return embed, layer, head, ("batch", self.dim)

    def _conv_costs(self) -> tuple[float, float, float, tuple[str | int, ...]]:
        half = self.image_size // 2
        embed = linear_flops(self.image_size**2, 9 * self.dim)
        layer = linear_flops(half**2, 9 * self.dim * self.dim)
        head = linear_flops(1, self.dim * self.pooled_size**2 * self.ffn, self.ffn * self.classes)
        return embed, layer, head, ("batch", self.dim, half, half)


PRESETS = {
    "mnist-mlp": Config(),
    "mnist-conv": Config(arch="conv", layers=1, dim=16, ffn=128),
}

AXES = {
    "embed.proj.weight": ("embed", "pixels"),
    "embed.proj.bias": ("embed",),
    "embed.conv.weight": ("channels", "grey", "height", "width"),
    "*.conv.bias": ("channels",),
    "layer*.conv.weight": ("channels", "channels_in", "height", "width"),
    "*.up.weight": ("ffn", "embed"),
    "*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
    "head.down.weight": ("classes", "ffn"),
    "head.down.bias": ("classes",),
    "head.proj.weight": ("classes", "embed"),
    "head.proj.bias": ("classes",),
}


def ties(cfg: Config) -> dict[str, str]:
    """Nothing is tied."""
    return {}


def init(cfg: Config) -> dict[str, Draw]:
    """Normal with variance 2 / fan-in, which keeps the scale through ReLUs (He et al. 2015); biases start at zero."""
    head_in = cfg.dim * cfg.pooled_size**2
    fan_in = {
        "embed.proj.weight": cfg.image_size**2,
        "embed.conv.weight": 9,
        "layer*.conv.weight": 9 * cfg.dim,
        "layer*.up.weight": cfg.dim,
        "*.down.weight": cfg.ffn,
        "head.up.weight": head_in,
        "head.proj.weight": cfg.dim,
    }
    normal: dict[str, Draw] = {pattern: ("normal", (2 / size) ** 0.5) for pattern, size in fan_in.items()}
    return {**normal, "*.bias": ("zeros",)}


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    from weft.models.layers import Loss  # late: a config is read and checked without torch

    embed, *layers, head = _mlp(cfg) if cfg.arch == "mlp" else _conv(cfg)
    return {"embed": embed, **{f"layer{i}": layer for i, layer in enumerate(layers)}, "head": head, "loss": Loss()}


def _mlp(cfg: Config) -> tuple[nn.Module, ...]:
    from weft.models.images import FlatEmbed, FlatHead, FlatLayer

    layers = (FlatLayer(cfg.dim, cfg.ffn) for _ in range(cfg.layers))
    return FlatEmbed(cfg.image_size**2, cfg.dim), *layers, FlatHead(cfg.dim, cfg.classes)


def _conv(cfg: Config) -> tuple[nn.Module, ...]:
    from weft.models.images import ConvEmbed, ConvHead, ConvLayer

    layers = (ConvLayer(cfg.dim) for _ in range(cfg.layers))
    head = ConvHead(cfg.dim * cfg.pooled_size**2, ffn=cfg.ffn, classes=cfg.classes)
    return ConvEmbed(cfg.dim), *layers, head
