"""Mutants of linears and experts in 8-bit floats: scales and operands of others, of before, of other ranks; other roundings."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.model_config import ModelConfig
from weft.models.common.experts import expert_linear
from weft.models.common.linear_products import LARGEST_E4M3, PRODUCT
from weft.parallel.dp import AXIS as DP_AXIS
from weft.parallel.ep import AXIS as EP_AXIS
from weft.parallel.tensor.region import Region
from weft.parallel.tp import AXIS as TP_AXIS
from weft_selftest.mutants.fault import FunctionFault, Mutant, MutantLayout

FP8 = "--precision.linears fp8"
DP = MutantLayout("dp2", options=FP8)
TP = MutantLayout("tp2", options=FP8)
EP = MutantLayout("ep2", family="qwen3-moe", options=FP8)
INSIDE_REGIONS = "--precision.fp8_exclude attn.q_a attn.kv_a"
PRODUCTS = "weft.models.common.linear_products"
OPERANDS = "weft.models.common.fp8_operands"
EXPERTS = "weft.models.common.fp8_experts"
LAYERS = ("layer*",)


def of_next_row(scales: Callable[[Tensor], Tensor], largest: Tensor) -> Tensor:
    """A row has the scale of the row after it."""
    return scales(largest).roll(-1)


@dataclass
class PreviousScales:
    """Scales are those of the product before it that had as many rows."""

    scales: dict[tuple[int, torch.Size], Tensor] = field(default_factory=dict)

    def __call__(self, scales: Callable[[Tensor], Tensor], largest: Tensor) -> Tensor:
        key = (threading.get_ident(), largest.shape)
        now = scales(largest)
        before = self.scales.get(key, now)
        self.scales[key] = now
        return before


def in_e5m2(in_e4m3: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Numbers have a bit of mantissa less."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(mantissa * 8) / 8, exponent)


def saturated(in_e4m3: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Numbers beyond the largest become that, as some casts do."""
    return in_e4m3(x.clamp(-LARGEST_E4M3, LARGEST_E4M3))


def smallest_part(largest: Callable[..., Tensor], region: Region, magnitudes: Tensor) -> Tensor:
    """Of the largest numbers of the ranks the smallest."""
    return -largest(region, -magnitudes)


def towards_zero(in_e4m3: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Numbers between two of e4m3 become the smaller one."""
    nearest = in_e4m3(x)
    return torch.where(nearest.abs() > x.abs(), in_e4m3(2 * x - nearest), nearest)


def not_rounded(product: Callable[..., Tensor], linear: Any, dy: Tensor, weight: Tensor) -> Tensor:
    """Input gradients are products of the operands."""
    return dy @ weight


def of_next_expert(scales: Callable[[Tensor], Tensor], largest: Tensor) -> Tensor:
    """The rows of an expert's matrix have the scales of the next expert's."""
    found = scales(largest)
    return found.roll(-1, 0) if found.dim() == 2 else found


def of_all_tokens(rounded: Callable[..., Any], x: Tensor, largest: Any, **how: Any) -> Any:
    """All tokens of a product have the scale of the largest one."""

    def of_all(magnitudes: Tensor) -> Tensor:
        found = magnitudes if largest is None else largest(magnitudes)
        return found.amax().expand_as(found) if found.numel() else found

    return rounded(x, of_all if x.dim() == 2 else largest, **how)


def keeps_weights(end: Callable[[Any], None], kept: Any) -> None:
    """Rows of weights stay after the pass whose values they have."""
    kept.last_input = None


def of_equal_sizes(rows: Callable[..., Any], last: Any, x: Tensor, *args: Any) -> Any:
    """The rows of an input are those of the linear before, if it had as many."""
    if last._rows is not None and last._rows.values.shape == x.flatten(0, -2).shape:
        return last._rows
    return rows(last, x, *args)


def experts_not_rounded(
    product: Callable[..., Tensor], own: Any, dy: Tensor, weight: Tensor, loads: Any
) -> Tensor:
    """Input gradients of experts are products of the operands."""
    return expert_linear(dy, weight.mT, loads)


def each_shares_none(share: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Each rank takes the scales of its own part of an expert's rows."""


def none_in_fp8(take: Callable[[nn.Module], Iterator[Any]], block: nn.Module) -> Iterator[Any]:
    """No linear is known to compute in fp8, so those inside of regions round parts of gradients."""
    for module in block.modules():
        vars(module).pop(PRODUCT, None)
    return iter(())


def every_linear(linears: Callable[..., Any], precision: Any, model: ModelConfig) -> Any:
    """Nothing is excluded from fp8."""
    return tuple(model.linears())


SATURATED = FunctionFault(f"{PRODUCTS}:in_e4m3", saturated)

MUTANTS = (
    Mutant(
        "rows_in_fp8_have_the_scale_of_the_next_row",
        "rows are as long as each other in most products",
        DP,
        (FunctionFault(f"{PRODUCTS}:scales", of_next_row), SATURATED),
        axes=(DP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "scales_in_fp8_are_those_of_the_product_before",
        "a history of scales is kept for all linears together",
        DP,
        (FunctionFault(f"{PRODUCTS}:scales", PreviousScales()), SATURATED),
        axes=(DP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "linears_in_fp8_have_two_bits_of_mantissa",
        "e5m2 in place of e4m3",
        TP,
        (FunctionFault(f"{PRODUCTS}:in_e4m3", in_e5m2),),
        axes=(TP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "numbers_in_fp8_are_cut_off",
        "they are rounded towards zero",
        DP,
        (FunctionFault(f"{PRODUCTS}:in_e4m3", towards_zero),),
        axes=(DP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "input_gradients_of_linears_in_fp8_are_not_rounded",
        "the backward has another recipe than the forward says",
        DP,
        (FunctionFault(f"{PRODUCTS}:Fp8Product.input_gradient", not_rounded),),
        axes=(DP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "rows_in_fp8_are_scaled_by_the_smallest_of_their_parts",
        "another reduction over the tensor ranks that share rows",
        TP,
        (FunctionFault("weft.parallel.tensor.region:Region.largest", smallest_part), SATURATED),
        axes=(TP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "experts_in_fp8_have_the_scales_of_the_next_expert",
        "matrices of experts are alike until they have learned",
        EP,
        (FunctionFault(f"{PRODUCTS}:scales", of_next_expert), SATURATED),
        axes=(EP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "tokens_of_experts_in_fp8_have_one_scale",
        "a scale of the whole tensor depends on the tokens that are computed together",
        EP,
        (FunctionFault(f"{EXPERTS}:rounded_rows", of_all_tokens),),
        axes=(EP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "input_gradients_of_experts_in_fp8_are_not_rounded",
        "the backward of experts has another recipe than that of linears",
        EP,
        (FunctionFault(f"{EXPERTS}:Fp8ExpertProduct.input_gradient", experts_not_rounded),),
        axes=(EP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "tensor_ranks_scale_their_parts_of_the_rows_of_experts",
        "rows of an expert that ranks share have a scale on each of them",
        MutantLayout("tp2", family="qwen3-moe", options=FP8),
        (FunctionFault("weft.parallel.tensor.transform:share_expert_rows", each_shares_none),),
        axes=(TP_AXIS,),
        blocks=LAYERS,
    ),
    Mutant(
        "weights_in_fp8_are_those_of_the_step_before",
        "rows that serve all micro-batches of a step serve those of the next one",
        DP,
        (FunctionFault(f"{OPERANDS}:KeptOperands.end", keeps_weights),),
        axes=(DP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "experts_in_fp8_have_the_weights_of_the_step_before",
        "the same of experts, of which some learn in few steps alone",
        EP,
        (FunctionFault(f"{OPERANDS}:KeptOperands.end", keeps_weights),),
        axes=(EP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "linears_in_fp8_read_the_input_of_the_linear_before",
        "rows are kept for linears that read one input, and found by their sizes",
        DP,
        (FunctionFault(f"{OPERANDS}:LastInput.rows", of_equal_sizes),),
        axes=(DP_AXIS, ""),
        blocks=LAYERS,
    ),
    Mutant(
        "parts_of_gradients_are_rounded_before_their_sum",
        "a whole linear inside a tensor-parallel region rounds its rank's part",
        MutantLayout("tp2", family="deepseek", options=f"{FP8} {INSIDE_REGIONS}"),
        (
            FunctionFault("weft.train.build:fp8_linears", every_linear),
            FunctionFault("weft.parallel.tensor.instrument:_take_fp8", none_in_fp8),
        ),
        axes=(TP_AXIS,),
        blocks=LAYERS,
    ),
)
