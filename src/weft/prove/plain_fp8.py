"""Linears in 8-bit floats by definition: the list of all numbers of e4m3, the nearest one of it, the largest power of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from weft.models.common.experts import PRODUCTS, ExpertLoads
from weft.models.common.linear_products import PRODUCT, Fp8Product, LinearProduct, product_of

LARGEST = 448.0
POWERS = tuple(2.0**exponent for exponent in range(-126, 126))
"""By which rows may be multiplied."""


def use_plain_fp8(blocks: Mapping[str, nn.Module]) -> None:
    """Have the linears and experts in fp8 compute by definition: what `Fp8Product` and
    `Fp8ExpertProduct` must equal.
    """
    for block in blocks.values():
        for module in block.modules():
            if isinstance(product_of(module), Fp8Product):
                vars(module)[PRODUCT] = PlainFp8()
            products = vars(module).get(PRODUCTS, {})
            products.update(dict.fromkeys(products, PlainFp8Experts()))


@dataclass(frozen=True)
class PlainFp8(LinearProduct):
    """x W^T, and dy W backward, of rows in e4m3; the gradient of W is a product of the operands."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _PlainFp8.apply(x, weight)  # type: ignore[no-untyped-call]
        return y if bias is None else y + bias


class PlainFp8Experts:
    """A linear in fp8 for each expert, of its own tokens."""

    def __call__(
        self, x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads, *, bias_EM: Tensor | None = None
    ) -> Tensor:
        runs = x_NK.split(loads.lengths(len(x_NK)))
        biases = [None] * len(runs) if bias_EM is None else bias_EM.unbind()
        product = PlainFp8()
        return torch.cat([product(*each) for each in zip(runs, weight_EMK, biases, strict=True)])


class _PlainFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        d_weight = torch.tensordot(dy.flatten(0, -2).t(), x.flatten(0, -2), 1)
        return _product(dy, weight.t()), d_weight


def _product(a: Tensor, b_MK: Tensor) -> Tensor:
    """a b^T of rows in e4m3, summed in float32 at least."""
    if a.is_meta:
        return a @ b_MK.t()
    wide = torch.promote_types(a.dtype, torch.float32)
    product = _rounded_rows(a).to(wide) @ _rounded_rows(b_MK).to(wide).t()
    return product.to(a.dtype)


def _rounded_rows(x: Tensor) -> Tensor:
    """The nearest multiples of e4m3's numbers, where each row has a power of two of its own."""
    if x.dtype == torch.float64:
        x = x * (1 + 2.0**-30)  # the rule of ties in float64: see Note [Products in fp8]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs().amax(-1, keepdim=True)
    powers = torch.tensor(POWERS, dtype=x.dtype, device=x.device)
    num_fitting = torch.bucketize(LARGEST / largest, powers, right=True)
    scale = torch.where(largest.isfinite(), powers[(num_fitting - 1).clamp(min=0)], torch.nan)
    return nearest_e4m3(x * scale) / scale


def nearest_e4m3(x: Tensor) -> Tensor:
    """The nearest numbers of e4m3; of two that are as near the one whose last bit is 0. torch's own
    cast finds the same of types whose numbers float32 represents.
    """
    if x.dtype != torch.float64:
        return x.to(torch.float8_e4m3fn).to(x.dtype)
    numbers = torch.tensor(e4m3_numbers(), dtype=torch.float64, device=x.device)
    between = (numbers[1:] + numbers[:-1]) / 2
    size = x.abs().contiguous()
    lower = torch.bucketize(size, between)
    upper = torch.bucketize(size, between, right=True)
    code = torch.where(lower % 2 == 0, lower, upper)
    nearest = torch.copysign(numbers[code], x)
    return torch.where(x.isnan(), torch.nan, nearest)


@lru_cache(maxsize=1)
def e4m3_numbers() -> tuple[float, ...]:
    """All numbers of e4m3 from 0, by their bits: 4 of exponent with bias 7, 3 of mantissa; the last
    code is NaN.
    """
    found = []
    for code in range(127):
        exponent, mantissa = divmod(code, 8)
        if exponent == 0:
            found.append(mantissa * 2.0**-9)
        else:
            found.append((8 + mantissa) * 2.0 ** (exponent - 10))
    return tuple(found)
