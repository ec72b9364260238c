"""Matrix products of linears: in the number type of their operands, or of rows that are rounded to 8-bit floats (fp8).

Note [Products in fp8]
    A linear has three products. With fp8 linears two of them are of rows rounded to e4m3 (Micikevicius et al.
    2022: 4 bits of exponent, 3 of mantissa, up to 448), summed in float32:

        y  = x W^T      rows of x (tokens), rows of W (output features)
        dx = dy W       rows of dy (tokens), columns of W (input features)
        dW = dy^T x     in the type of compute: its rows would be of tokens, which micro-batches and
                        ranks share out, and a scale over all of them cannot be known before the last one

    Each row is multiplied by the largest power of two that keeps its largest entry within 448; which
    rows serve several products says Note [Operands that are kept]. Scaling is exact then, so that a
    rounding depends on its entry alone, but for entries below 2^-15 of the row's largest. Gradients
    have e4m3, too: a row has a scale of its own, so that it needs digits more than e5m2's range. This
    is the recipe "rowwise with grad weight in high precision" of torchao.

    A row whose entries several tensor-parallel ranks hold has one scale: `largest_in` and `largest_out`
    reduce the largest entries over the ranks that share the input features, or the output features.

    Devices without these products (`has_fp8_kernel`) compute the same products of the rounded rows in
    float32.

    Routed experts have the same three products, each token with the matrix of its expert, whose rows
    have scales of their own (fp8_experts.py).

    Operands in float64, as a proof has them, are rounded from float64, and products summed in it. Then
    two orders of summation round alike, unless an entry is halfway between two numbers of e4m3 to 15
    digits. Sums of products in fp8 have few digits, and so they are exactly halfway now and then: the
    values of a first token, which attention hands on as they are up to a rounding. Hence operands in
    float64 are multiplied by OFF_HALFWAY, by which such entries are rounded up on both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from weft.errors import Fault, PlanError
from weft.models.common.fp8_operands import KeptOperands, RoundedRows, Use

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3, LARGEST_MANTISSA = 448.0, 0.875
"""448 = 0.875 * 2^9."""
SMALLEST_ROW = 2.0**-117
"""Rows whose largest entry is smaller have its scale, 2^125: scales are numbers of float32."""
LEAST_EXPONENT, MANTISSA_BITS = -5, 4
"""Of numbers m * 2^e of e4m3 with 1/2 <= m < 1; smaller ones are multiples of 2^-9."""
OFF_HALFWAY = 1 + 2.0**-30
FP8_CAPABILITY = (8, 9)
FP8_UNIT = 16
"""Features that the kernels of GPUs take are multiples of this."""

Largest = Callable[[Tensor], Tensor]
"""Largest magnitudes of a rank's part of each row -> of the whole rows."""


class LinearProduct:
    """The products of a linear in the number type of its operands."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b, which autograd differentiates."""
        return F.linear(x, weight, bias)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + b."""
        return F.linear(x, weight, bias)

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        """dy W."""
        return dy @ weight


@dataclass(frozen=True)
class Fp8Product(LinearProduct):
    """The products of a linear of rows in fp8; see Note [Products in fp8].

    Attributes:
        largest_in: where ranks share the input features; None: each has them all.
        largest_out: where they share the output features.
        kept: what a pass over micro-batches keeps of the operands.
    """

    largest_in: Largest | None = None
    largest_out: Largest | None = None
    kept: KeptOperands = field(default_factory=KeptOperands, compare=False, repr=False)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return fp8_linear(x, weight, bias, self)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self._product(x, weight, "output", self.largest_in)
        return y if bias is None else y + bias

    def input_gradient(self, dy: Tensor, weight: Tensor) -> Tensor:
        return self._product(dy, weight.t(), "input gradient", self.largest_out)

    def _product(self, x: Tensor, weight_MK: Tensor, use: Use, largest: Largest | None) -> Tensor:
        """x W^T of rows in fp8, in the type of x.

        Args:
            largest: where ranks share K: reduces the largest magnitudes of rows over them.
        """
        for_kernel = has_fp8_kernel(weight_MK, columns=len(weight_MK))

        def rows_of_x() -> RoundedRows:
            return rounded_rows(rows(x), largest, for_kernel=for_kernel)

        def rows_of_weight() -> RoundedRows:
            return rounded_rows(weight_MK, largest, for_kernel=for_kernel)

        is_input = use == "output"
        a = self.kept.input(x, (largest, for_kernel), rows_of_x) if is_input else rows_of_x()
        b = self.kept.weight(use, rows_of_weight)
        return _like_rows(x, product_of_rounded(a, b, x.dtype))


PLAIN_PRODUCT = LinearProduct()
PRODUCT = "linear_product"
"""Attribute of linears that compute other products than torch's."""


def product_of(linear: nn.Module) -> LinearProduct:
    """The products that a linear computes."""
    return cast(LinearProduct, vars(linear).get(PRODUCT, PLAIN_PRODUCT))


def share_rows(
    linear: nn.Module, *, largest_in: Largest | None = None, largest_out: Largest | None = None
) -> None:
    """Have a linear whose features ranks share take scales over all of them, if it computes in fp8."""
    product = product_of(linear)
    if isinstance(product, Fp8Product):
        # with operands of its own: what was kept before was scaled by this rank's entries alone
        vars(linear)[PRODUCT] = Fp8Product(largest_in, largest_out)


class Fp8Linear(nn.Linear):
    """A linear whose products are of rows in fp8."""

    def forward(self, input: Tensor) -> Tensor:
        return product_of(self)(input, self.weight, self.bias)


def use_fp8(linear: nn.Linear) -> None:
    """Have a torch.nn.Linear compute in fp8 from now on: the same object, with the same parameters."""
    linear.__class__ = Fp8Linear
    vars(linear)[PRODUCT] = Fp8Product()


def fp8_linear(x: Tensor, weight: Tensor, bias: Tensor | None, product: Fp8Product) -> Tensor:
    """x W^T + b; modes see one function of torch, as `F.linear` is one."""
    if has_torch_function((x, weight)):
        out: Tensor = handle_torch_function(fp8_linear, (x, weight), x, weight, bias, product)
        return out
    y: Tensor = _Fp8Linear.apply(x, weight, product)  # type: ignore[no-untyped-call]
    return y if bias is None else y + bias


class _Fp8Linear(torch.autograd.Function):
    """x W^T; backward: the gradient of x by fp8, that of W in the type of the operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Fp8Product) -> Tensor:
        # not the rounded rows: the gradient of the weight is of the operands as they are
        ctx.save_for_backward(x, weight)
        ctx.product = product
        return product.output(x, weight, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx = None
        d_weight = None
        if is_asked_for(ctx, 0):
            dx = ctx.product.input_gradient(dy, weight)
        if is_asked_for(ctx, 1):
            d_weight = rows(dy).t() @ rows(x)
        return dx, d_weight, None


def is_asked_for(ctx: Any, index: int) -> bool:
    """Whether this backward needs the gradient of an input. The two parts of a split backward ask for
    one each, and autograd's own nodes then compute one, but `needs_input_grad` is that of the forward.
    """
    if not ctx.needs_input_grad[index]:
        return False
    if torch.compiler.is_compiling():
        return True
    node, _ = ctx.next_functions[index]
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch does not say it of a leaf in `torch.autograd.grad`
        return True


def rows(x: Tensor) -> Tensor:
    """x[..., features] as a matrix; one vector is one row."""
    return x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)


def _like_rows(x: Tensor, matrix: Tensor) -> Tensor:
    """The rows of a matrix in the places of those of x; no view in the eyes of autograd, so that the
    caller may change it in place.
    """
    shape = (*x.shape[:-1], matrix.shape[1])
    unviewed: Tensor = torch.ops.aten._unsafe_view(matrix, shape)
    return unviewed


def rounded_rows(x: Tensor, largest: Largest | None, *, for_kernel: bool) -> RoundedRows:
    """The rows x[..., K], each multiplied by the largest power of two that keeps it within the range of
    e4m3, and rounded.

    Args:
        largest: where ranks share K: reduces the largest magnitudes of rows over them.
        for_kernel: for products of the device: in e4m3, one row after the other.
    """
    dtype = x.dtype
    wide = torch.promote_types(dtype, torch.float32)
    if dtype == torch.float64:
        x = x * OFF_HALFWAY
    elif dtype == torch.float16:  # scales are beyond its range
        x = x.to(wide)
    magnitudes = _largest_of_rows(x)
    if largest is not None:
        # before the scale: all ranks that share a row must round it alike
        magnitudes = largest(magnitudes)
    scale = scales(magnitudes.to(wide)).unsqueeze(-1)
    factor = scale.to(x.dtype)
    if not for_kernel:
        return RoundedRows(in_e4m3(x * factor).to(wide), 1 / scale)
    if torch.compiler.is_compiling():  # which fuses both
        values = (x * factor).to(E4M3, memory_format=torch.contiguous_format)
    else:
        values = torch.empty(x.shape, dtype=E4M3, device=x.device)
        torch.mul(x, factor, out=values)  # one kernel, no product in wider numbers in between
    return RoundedRows(values, 1 / scale)


def product_of_rounded(a: RoundedRows, b: RoundedRows, dtype: torch.dtype) -> Tensor:
    """a_NK b_MK^T of rows that were rounded alike -> [N, M] of this type."""
    if a.values.dtype == E4M3:
        # sums in float32, as below, since fast accumulation would keep fewer digits of them
        return torch._scaled_mm(
            a.values,
            b.values.t(),
            scale_a=a.inverse,
            scale_b=b.inverse.t(),
            out_dtype=dtype,
            use_fast_accum=False,
        )
    product_NM = a.values @ b.values.t()
    product_NM *= a.inverse
    product_NM *= b.inverse.t()
    return product_NM.to(dtype)


def _largest_of_rows(x: Tensor) -> Tensor:
    """The largest magnitude of each row; no |x| is written."""
    if x.is_cuda or x.is_meta:
        norms: Tensor = torch.linalg.vector_norm(x, torch.inf, dim=-1)  # reads x once
        return norms
    return torch.maximum(x.amax(-1), -x.amin(-1))  # on CPUs a twentieth of its time


def scales(largest: Tensor) -> Tensor:
    """The largest powers of two that keep numbers of these magnitudes within 448; NaN of numbers that
    are not finite, so that a row with one has no finite product.
    """
    largest = largest.clamp(min=SMALLEST_ROW)
    mantissa, _ = torch.frexp(largest)  # largest = mantissa * 2^exponent, 1/2 <= mantissa < 1
    top = torch.where(mantissa > LARGEST_MANTISSA, 2.0**8, 2.0**9)
    return top.to(largest.dtype) * (mantissa / largest)  # the quotient is 2^-exponent, exactly


def in_e4m3(x: Tensor) -> Tensor:
    """The nearest numbers of e4m3, ties to even, in the type of x; NaN beyond 448."""
    if x.dtype != torch.float64:
        return x.to(E4M3).to(x.dtype)
    # torch casts float64 by way of float32, and so rounds twice
    _, exponent = torch.frexp(x)
    exponents = range(LEAST_EXPONENT, 10)
    steps = torch.tensor(
        [2.0 ** (each - MANTISSA_BITS) for each in exponents], dtype=x.dtype, device=x.device
    )
    step = steps[exponent.clamp(LEAST_EXPONENT, exponents[-1]).long() - LEAST_EXPONENT]
    nearest = torch.round(x / step) * step
    return nearest.masked_fill_(nearest.abs() > LARGEST_E4M3, torch.nan)


def has_fp8_kernel(x: Tensor, *, columns: int) -> bool:
    """Whether the device of x multiplies rows in fp8, and sizes are those that its kernels take; of
    tensors without values (predictions) a device that does.

    Raises:
        PlanError: a GPU that has no such products, and would compute them more slowly than others.
    """
    if not (x.is_cuda or x.is_meta) or x.dtype != torch.bfloat16:
        return False
    if x.shape[-1] % FP8_UNIT or columns % FP8_UNIT:
        return False
    if torch.compiler.is_compiling():
        return True  # the run was checked at its start; the query would divide the graph
    if x.is_cuda and _capability(x.device) < FP8_CAPABILITY:
        what = "this GPU has no products in fp8"
        need = "compute capability 8.9 or more"
        fix = "--precision.linears default"
        raise PlanError(Fault("precision.linears", what, need=need, fix=fix))
    return True


@lru_cache(maxsize=64)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
