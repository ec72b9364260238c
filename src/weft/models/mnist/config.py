"""Two small classifiers of grey images, an MLP and a convolutional net, as chains of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import AxisTable, BlockSpec, Draw, ModelConfig, linear_flops


class Config(ModelConfig):
    """The classifiers' shape; the defaults are mnist-mlp."""

    family: ClassVar[str] = "mnist"
    kind: ClassVar[Literal["tokens", "images"]] = "images"

    arch: Literal["mlp", "conv"] = Field(
        "mlp", description="fully connected layers, or convolutions"
    )
    layers: int = Field(2, ge=0, description="hidden layers between the first and the head")
    dim: int = Field(
        128, ge=1, description="width of the hidden layers; channels of the convolutions"
    )
    ffn: int = Field(
        256,
        ge=1,
        description="width between the two linears of a layer (mlp) or of the head (conv)",
    )
    classes: int = Field(10, ge=1, description="classes to tell apart")
    image_size: int = Field(28, ge=1, description="height and width of an image in pixels")

    @field_validator("image_size")
    @classmethod
    def _conv_halves_twice(cls, image_size: int, info: ValidationInfo) -> int:
        if info.data.get("arch") == "conv" and image_size % 4:
            near = max(4, round(image_size / 4) * 4)
            raise ValueError(
                f'{image_size} is not divisible by 4, and arch "conv" halves it twice; try {near}'
            )
        return image_size

    @property
    def pooled_size(self) -> int:
        """Height and width that the conv net's head flattens."""
        return self.image_size // 4

    def axis_sizes(self) -> dict[str, int]:
        return {"ffn": self.ffn}

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        costs = self._mlp_costs() if self.arch == "mlp" else self._conv_costs()
        logits = ("batch", self.classes)
        specs = [BlockSpec("embed", costs.embed, costs.hidden, is_layer=False)]
        for layer in range(self.layers):
            spec = BlockSpec(f"layer{layer}", costs.layer, costs.hidden, is_layer=True)
            specs.append(spec)
        head = BlockSpec("head", costs.head, logits, is_layer=False)
        loss = BlockSpec("loss", 0.0, (), is_layer=False)
        return (*specs, head, loss)

    def _mlp_costs(self) -> _Costs:
        return _Costs(
            embed=linear_flops(1, self.image_size**2 * self.dim),
            layer=linear_flops(1, 2 * self.dim * self.ffn),
            head=linear_flops(1, self.dim * self.classes),
            hidden=("batch", self.dim),
        )

    def _conv_costs(self) -> _Costs:
        half = self.image_size // 2
        num_features = self.dim * self.pooled_size**2
        layer_weights = 9 * self.dim * self.dim
        return _Costs(
            embed=linear_flops(self.image_size**2, 9 * self.dim),
            layer=linear_flops(half**2, layer_weights),
            head=linear_flops(1, num_features * self.ffn, self.ffn * self.classes),
            hidden=("batch", self.dim, half, half),
        )


@dataclass(frozen=True)
class _Costs:
    """FLOPs of the blocks for one image, and the shape that they pass on."""

    embed: float
    layer: float
    head: float
    hidden: tuple[str | int, ...]


PRESETS = {"mnist-mlp": Config(), "mnist-conv": Config(arch="conv", layers=1, dim=16, ffn=128)}

AXES: AxisTable = {
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
    """No parameters are tied."""
    return {}


def init(cfg: Config) -> dict[str, Draw]:
    """Normal with variance 2 / fan-in before a ReLU (He et al. 2015), 1 / fan-in for the logits;
    biases are zero.
    """
    return {
        "embed.proj.weight": _normal(2.0, cfg.image_size**2),
        "embed.conv.weight": _normal(2.0, 9),
        "layer*.conv.weight": _normal(2.0, 9 * cfg.dim),
        "layer*.up.weight": _normal(2.0, cfg.dim),
        "layer*.down.weight": _normal(2.0, cfg.ffn),
        "head.up.weight": _normal(2.0, cfg.dim * cfg.pooled_size**2),
        "head.down.weight": _normal(1.0, cfg.ffn),
        "head.proj.weight": _normal(1.0, cfg.dim),
        "*.bias": ("zeros",),
    }


def _normal(gain: float, fan_in: int) -> Draw:
    return "normal", (gain / fan_in) ** 0.5
