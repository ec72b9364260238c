"""Owns low-rank adapters (Hu et al. 2021, LoRA): beside a linear that is frozen stands a product of two thin matrices.

    y = W x + b + (alpha / rank) B A x          A: rank x in, drawn by its name; B: out x rank, zero

A family with adapters is a family: whoever takes one takes the other, under any layout. The rows of its tables are those
of the plain family, and two for every row of a matrix: A has the linear's input axis, B its output axis, and the rank
between them is an axis that nothing cuts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.lora import LORA_A, LORA_B, adapted_linears
from weft.config.schema import LoraConfig
from weft.core.model_config import AxisTable, Draw, InitTable, ModelConfig
from weft.models import Family
from weft.models.common.moe import Router

FACTORS = ("lora_a", "lora_b")


class Factor(nn.Module):
    """One of an adapter's matrices: x -> scale x W^T. It is cut as the linear that holds it, and no linear of its own."""

    def __init__(self, in_features: int, out_features: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x if self.scale == 1 else x * self.scale, self.weight)


class LoraLinear(nn.Linear):
    """A linear with an adapter; both see the same x, and their results are one sum before anything else happens to it."""

    lora_a: Factor
    lora_b: Factor

    @classmethod
    def beside(cls, linear: nn.Linear, lora: LoraConfig) -> LoraLinear:
        """The linear with a fresh adapter; its weight and bias stay the very same parameters."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a = Factor(linear.in_features, lora.rank)
        self.lora_b = Factor(lora.rank, linear.out_features, scale=lora.alpha / lora.rank)
        return self

    def forward(self, input: Tensor) -> Tensor:
        return plus_adapter(self, input, super().forward(input))


def take_adapter(module: nn.Module, source: nn.Module | None = None) -> None:
    """Let `module` have the adapter of `source`, or none."""
    for name in FACTORS:
        module.register_module(name, getattr(source, name, None))


def plus_adapter(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y, and what the adapter of `module` makes of x where it has one."""
    first, second = (getattr(module, name) for name in FACTORS)
    return y if first is None else y + second(first(x))


def add_product(weight: Tensor, product: Tensor, *, scale: float) -> Tensor:
    """W + scale B A from W and B A, computed in the wider type, in the type of W."""
    wide = torch.promote_types(weight.dtype, product.dtype)
    return (weight.to(wide) + scale * product.to(wide)).to(weight.dtype)


@dataclass(frozen=True)
class AdaptedFamily:
    """A family whose models have adapters and are frozen but for them."""

    plain: Family
    lora: LoraConfig

    @property
    def Config(self) -> type[ModelConfig]:  # noqa: N802 (a class, as in every family)
        """The plain family's."""
        return self.plain.Config

    @property
    def PRESETS(self) -> Mapping[str, ModelConfig]:  # noqa: N802 (a constant, as in every family)
        """The plain family's."""
        return self.plain.PRESETS

    @property
    def AXES(self) -> AxisTable:  # noqa: N802 (a constant, as in every family)
        """The plain family's rows, and those of adapters."""
        matrices = {
            row.removesuffix(".weight"): axes
            for row, axes in self.plain.AXES.items()
            if row.endswith(".weight") and len(axes) == 2
        }
        first = {name + LORA_A: ("rank", into) for name, (_, into) in matrices.items()}
        second = {name + LORA_B: (out, "rank") for name, (out, _) in matrices.items()}
        return {**self.plain.AXES, **first, **second}

    def ties(self, cfg: Any) -> dict[str, str]:
        """The plain family's."""
        return self.plain.ties(cfg)

    def init(self, cfg: Any) -> InitTable:
        """The plain family's rows, and for A the variance 1 / (3 x features in) of torch's linears, for B zero."""
        linears = cfg.linears()
        draws: dict[str, Draw] = {
            name + LORA_A: ("normal", (3 * linears[name][1]) ** -0.5)
            for name in adapted_linears(self.lora.targets, linears)
        }
        return {**self.plain.init(cfg), **draws, f"*{LORA_B}": ("zeros",)}

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The plain family's chain, frozen, with adapters beside the linears that `lora.targets` names."""
        blocks = self.plain.blocks(cfg)
        for block in blocks.values():
            freeze(block)
        for name in adapted_linears(self.lora.targets, cfg.linears()):
            block_name, _, path = name.partition(".")
            linear = blocks[block_name].get_submodule(path)
            assert isinstance(linear, nn.Linear), f"{name} is a {type(linear).__name__}, and Config.linears names it"
            blocks[block_name].set_submodule(path, LoraLinear.beside(linear, self.lora))
        return blocks


def freeze(block: nn.Module) -> None:
    """Let nothing in a block move: no parameter, and no bias by which routers balance their load."""
    block.requires_grad_(False)
    for router in (module for module in block.modules() if isinstance(module, Router)):
        router.rate = 0.0


def adapted(plain: Family, lora: LoraConfig) -> Family:
    """The family as `lora` asks for it: with adapters, or as it is where the rank is 0."""
    return cast(Family, AdaptedFamily(plain, lora)) if lora.rank else plain
