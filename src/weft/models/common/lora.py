"""Low-rank adapters (LoRA, Hu et al. 2021): a frozen linear plus a trainable product of two thin matrices.

    y = W x + b + (alpha / rank) B A drop(x)    A: rank x in, drawn by its name; B: out x rank, zero

Note [Magnitudes of DoRA]
    DoRA (Liu et al. 2024) trains the norm of each row of the sum V = W + (alpha / rank) B A, too:

        y = (m / |V|) (W x + (alpha / rank) B A drop(x)) + b        m = |W| + d, d zero at the start

    with |.| the norms of rows, and |V| a constant in the backward (section 4.3). The parameter is d,
    not m: its gradient and its updates are those of m, and a run starts as its base, bit for bit. A
    linear whose input features are sharded adds the squares of its part of each row over the ranks.

`AdaptedFamily` is a `Family` whose models have adapters; it works under any layout. Its tables are
those of the plain family, plus rows for every row of a matrix: A has the linear's input axis, B and
magnitudes its output axis, and the rank between A and B is an axis that is never sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.config.hf.mapping import HFMapping
from weft.config.lora import LORA_A, LORA_B, LORA_M, adapted_linears
from weft.config.schema import LoraConfig
from weft.core.model_config import AxisTable, InitTable, ModelConfig
from weft.models import Family, builders_of
from weft.models.common.lazy_blocks import Builder, Builders
from weft.models.common.linear_products import PRODUCT, product_of
from weft.models.common.moe import Router
from weft.models.common.nf4 import block_dims

FACTORS = ("lora_a", "lora_b")
MAGNITUDE = "lora_magnitude"


class LoraFactor(nn.Module):
    """One of an adapter's matrices: x -> scale x W^T. It is sharded with the linear that holds it,
    not as one of its own.
    """

    def __init__(self, in_features: int, out_features: int, *, scale: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        if self.scale != 1:
            x = x * self.scale
        return F.linear(x, self.weight)


class LoraMagnitude(nn.Module):
    """What is added to the norms of the rows of a linear; see Note [Magnitudes of DoRA]."""

    def __init__(self, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features))


class LoraLinear(nn.Linear):
    """A linear with an adapter; both read the same x, and their results are summed first."""

    lora_a: LoraFactor
    lora_b: LoraFactor
    lora_magnitude: LoraMagnitude | None
    lora_dropout: float

    @classmethod
    def from_linear(cls, linear: nn.Linear, lora: LoraConfig) -> LoraLinear:
        """The linear with a fresh adapter; its weight and bias stay the same parameters."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        # the parameter and not its values: ties and tables of parameters hold this object
        self.weight = linear.weight
        self.bias = linear.bias
        scale = lora.alpha / lora.rank
        vars(self)[PRODUCT] = product_of(linear)
        self.lora_dropout = lora.dropout
        self.lora_a = LoraFactor(linear.in_features, lora.rank)
        self.lora_b = LoraFactor(lora.rank, linear.out_features, scale=scale)
        self.lora_magnitude = LoraMagnitude(linear.out_features) if lora.dora else None
        return self

    def forward(self, input: Tensor) -> Tensor:
        y = product_of(self)(input, self.weight, bias_before_magnitude(self))
        return with_magnitude(self, plus_adapter(self, input, y))


def take_adapter(module: nn.Module, source: nn.Module | None = None) -> None:
    """Register the adapter of `source` in `module`, or none."""
    vars(module)["lora_dropout"] = dropout_of(source)
    for name in (*FACTORS, MAGNITUDE):
        factor = getattr(source, name, None)
        module.register_module(name, factor)


def plus_adapter(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """y plus the adapter's output for x, where `module` has an adapter."""
    name_a, name_b = FACTORS
    lora_a = getattr(module, name_a)
    if lora_a is None:
        return y
    lora_b = getattr(module, name_b)
    product: Tensor = lora_b(lora_a(adapter_input(module, x)))
    return y + product


def has_adapter(module: nn.Module) -> bool:
    """Whether a linear has an adapter."""
    return getattr(module, FACTORS[0], None) is not None


def magnitude_of(module: nn.Module) -> LoraMagnitude | None:
    """The magnitudes of a linear; None where it has none."""
    return cast("LoraMagnitude | None", getattr(module, MAGNITUDE, None))


def bias_before_magnitude(module: Any) -> Tensor | None:
    """The bias, where it is added with the product: magnitudes are of the product without it."""
    bias: Tensor | None = module.bias if magnitude_of(module) is None else None
    return bias


RowSums = Callable[[Tensor], Tensor]
"""Squares of a rank's part of each row -> of the whole rows."""


def with_magnitude(module: Any, y: Tensor, row_sums: RowSums | None = None) -> Tensor:
    """y, the product of weight and adapter, with the magnitudes of `module` and its bias, if it has
    magnitudes; else y.

    Args:
        row_sums: where input features are sharded.
    """
    magnitude = magnitude_of(module)
    if magnitude is None:
        return y
    # computed in every forward: the weight may be gathered or unpacked for it alone
    own, summed = _row_norms(module, row_sums)
    scale = (own + magnitude.weight.to(own.dtype)) / summed  # 1 where nothing has been trained
    y = y * scale.to(y.dtype)
    return y if module.bias is None else y + module.bias


@torch.no_grad()
def _row_norms(module: Any, row_sums: RowSums | None) -> tuple[Tensor, Tensor]:
    """|W| and |W + (alpha / rank) B A|, in float32 at least."""
    weight: Tensor = module.weight
    wide = torch.promote_types(weight.dtype, torch.float32)
    a, b = module.lora_a.weight.to(wide), module.lora_b.weight.to(wide)
    squares = row_squares(weight.to(wide), b @ a, scale=module.lora_b.scale)
    if row_sums is not None:
        squares = row_sums(squares)
    own, summed = squares.sqrt().unbind(0)
    return own, summed


def row_squares(weight: Tensor, product: Tensor, *, scale: float) -> Tensor:
    """Sums over each row of the squares of W, and of W + scale B A: [2, out]."""
    return torch.stack([weight.square().sum(1), (weight + scale * product).square().sum(1)])


def adapter_input(module: nn.Module, x: Tensor) -> Tensor:
    """x, of which an adapter with dropout drops entries in training."""
    p = dropout_of(module)
    return F.dropout(x, p, module.training) if p else x


def dropout_of(module: nn.Module | None) -> float:
    """Probability that an entry of the adapter's input is dropped; 0 without an adapter."""
    return float(vars(module).get("lora_dropout", 0.0)) if module is not None else 0.0


def add_product(
    weight: Tensor, product: Tensor, *, scale: float, magnitude: Tensor | None = None
) -> Tensor:
    """W + scale B A from W and B A, computed in the wider type, in the type of W.

    Args:
        magnitude: what is added to the norms of these rows, which are whole; see
            Note [Magnitudes of DoRA]. Then float64 is the type, so that the result is rounded once.
    """
    wide = torch.promote_types(weight.dtype, product.dtype)
    if magnitude is not None:
        wide = torch.float64
    change = scale * product.to(wide)
    merged = weight.to(wide) + change
    if magnitude is not None:
        own, summed = row_squares(weight.to(wide), product.to(wide), scale=scale).sqrt().unbind(0)
        merged = merged * ((own + magnitude.to(wide)) / summed).unsqueeze(1)
    return merged.to(weight.dtype)


@dataclass(frozen=True)
class AdaptedFamily:
    """A family whose models have adapters; all other parameters are frozen."""

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
    def hf(self) -> HFMapping | None:
        """The plain family's."""
        return self.plain.hf

    def axes(self, cfg: Any) -> AxisTable:
        """The plain family's rows, and those of adapters."""
        plain = self.plain.axes(cfg)
        axes = dict(plain)
        for row, row_axes in plain.items():
            is_linear = row.endswith(".weight") and len(row_axes) == 2
            if not is_linear:
                continue
            linear = row.removesuffix(".weight")
            out_axis, in_axis = row_axes
            axes[linear + LORA_A] = ("rank", in_axis)
            axes[linear + LORA_B] = (out_axis, "rank")
            axes[linear + LORA_M] = (out_axis,)
        return axes

    def quantized(self, cfg: Any) -> dict[str, int]:
        """Weights that are held in 4 bits -> dim along which their blocks run."""
        return {} if self.lora.quantize == "none" else block_dims(self.plain, cfg)

    @property
    def has_double_blocks(self) -> bool:
        """Whether their scales are held in 8 bits."""
        return self.lora.quantize == "nf4_double"

    def ties(self, cfg: Any) -> dict[str, str]:
        """The plain family's."""
        return self.plain.ties(cfg)

    def init(self, cfg: Any) -> InitTable:
        """The plain family's rows, and for A the variance 1 / (3 x features in) of torch's linears,
        for B zero.
        """
        table = dict(self.plain.init(cfg))
        shapes = cfg.linears()
        for linear in adapted_linears(self.lora.targets, shapes):
            _, in_features = shapes[linear]
            std = (3 * in_features) ** -0.5
            table[linear + LORA_A] = ("normal", std)
        table[f"*{LORA_B}"] = ("zeros",)
        table[f"*{LORA_M}"] = ("zeros",)
        return table

    def blocks(self, cfg: Any) -> dict[str, nn.Module]:
        """The plain family's chain, frozen, with adapters on the linears that `lora.targets`
        names.
        """
        blocks = self.plain.blocks(cfg)
        paths_of = self._adapted_paths(cfg)
        for name, block in blocks.items():
            paths = paths_of.get(name, ())
            self._adapt(name, block, paths)
        return blocks

    def builders(self, cfg: Any) -> Builders | None:
        """Builders of these blocks; equal where the plain ones and the adapted linears are."""
        plain = builders_of(self.plain, cfg)
        if plain is None:
            return None
        paths_of = self._adapted_paths(cfg)
        known: dict[Hashable, Builder] = {}
        builders: dict[str, Builder] = {}
        for name, build in plain.items():
            paths = paths_of.get(name, ())
            key = (id(build), paths)
            adapted_build = partial(self._build_adapted, name, build, paths)
            builders[name] = known.setdefault(key, adapted_build)
        return builders

    def _adapted_paths(self, cfg: Any) -> dict[str, tuple[str, ...]]:
        """Name of a block -> paths of its adapted linears."""
        paths: dict[str, list[str]] = {}
        shapes = cfg.linears()
        for name in adapted_linears(self.lora.targets, shapes):
            block_name, _, path = name.partition(".")
            block_paths = paths.setdefault(block_name, [])
            block_paths.append(path)
        return {name: tuple(block_paths) for name, block_paths in paths.items()}

    def _build_adapted(self, name: str, build: Builder, paths: Sequence[str]) -> nn.Module:
        block = build()
        self._adapt(name, block, paths)
        return block

    def _adapt(self, name: str, block: nn.Module, paths: Sequence[str]) -> None:
        """Freeze a block and give the linears at these paths adapters; a head for labels, which the
        base need not have, is trained as a whole.
        """
        freeze(block)
        head: nn.Module | None = getattr(block, "trained_whole", None)
        if head is not None:
            head.requires_grad_(True)
        for path in paths:
            linear = block.get_submodule(path)
            assert isinstance(linear, nn.Linear), (
                f"{name}.{path} is a {type(linear).__name__}, and Config.linears names it"
            )
            block.set_submodule(path, LoraLinear.from_linear(linear, self.lora))


def freeze(block: nn.Module) -> None:
    """Freeze a block: its parameters, and the biases by which routers balance their load."""
    block.requires_grad_(False)
    for module in block.modules():
        if isinstance(module, Router):
            module.rate = 0.0


def adapted(plain: Family, lora: LoraConfig) -> Family:
    """The family with the adapters of `lora`; the plain family where the rank is 0."""
    if not lora.rank:
        return plain
    return cast(Family, AdaptedFamily(plain, lora))
