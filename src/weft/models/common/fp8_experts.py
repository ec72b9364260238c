"""Products of routed experts of rows in 8-bit floats; see Note [Products in fp8] in linear_products.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from weft.core.expert_choice import FP8
from weft.models.common.experts import (
    PRODUCTS,
    ExpertLoads,
    chosen_kernel,
    expert_bias,
    expert_product,
    expert_weight_gradient,
)
from weft.models.common.fp8_operands import KeptOperands, RoundedRows, Use
from weft.models.common.linear_products import (
    Largest,
    has_fp8_kernel,
    is_asked_for,
    product_of_rounded,
    rounded_rows,
)


@dataclass(frozen=True)
class Fp8ExpertProduct:
    """The products of tokens with the matrices of their experts, of rows in fp8; called as
    `expert_linear`.

    Attributes:
        largest_in: where ranks share the input features; None: each has them all.
        largest_out: where they share the output features.
        kept: what a pass over micro-batches keeps of the operands.
    """

    largest_in: Largest | None = None
    largest_out: Largest | None = None
    kept: KeptOperands = field(default_factory=KeptOperands, compare=False, repr=False)

    def __call__(
        self, x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads, *, bias_EM: Tensor | None = None
    ) -> Tensor:
        return fp8_expert_linear(x_NK, weight_EMK, loads, bias_EM, self)

    def output(self, x_NK: Tensor, weight_EMK: Tensor, loads: ExpertLoads) -> Tensor:
        """x W^T of each expert's tokens."""
        return self._product(x_NK, weight_EMK, loads, "output", self.largest_in)

    def input_gradient(self, dy_NM: Tensor, weight_EMK: Tensor, loads: ExpertLoads) -> Tensor:
        """dy W of each expert's tokens."""
        return self._product(dy_NM, weight_EMK.mT, loads, "input gradient", self.largest_out)

    def _product(
        self,
        x_NK: Tensor,
        weight_EMK: Tensor,
        loads: ExpertLoads,
        use: Use,
        largest: Largest | None,
    ) -> Tensor:
        """x W^T of each expert's tokens, of rows in fp8, in the type of x.

        Args:
            largest: where ranks share K: reduces the largest magnitudes of rows over them.
        """
        dtype = x_NK.dtype
        operands = FP8 if dtype == torch.bfloat16 else f"rows of {dtype} in fp8"
        kernel = chosen_kernel(x_NK, weight_EMK, loads, dtype=operands, is_aligned=True)
        columns = weight_EMK.shape[1]
        for_kernel = kernel == "grouped" or has_fp8_kernel(weight_EMK, columns=columns)

        def rows_of_x() -> RoundedRows:
            return rounded_rows(x_NK, largest, for_kernel=for_kernel)

        def rows_of_weight() -> RoundedRows:
            return rounded_rows(weight_EMK, largest, for_kernel=for_kernel)

        is_input = use == "output"
        x = self.kept.input(x_NK, (largest, for_kernel), rows_of_x) if is_input else rows_of_x()
        weight = self.kept.weight(use, rows_of_weight)
        if kernel == "grouped":
            return torch._scaled_grouped_mm(
                x.values,
                weight.values.mT,
                scale_a=x.inverse.squeeze(-1),
                scale_b=weight.inverse.squeeze(-1),
                offs=loads.ends,
                out_dtype=dtype,
                use_fast_accum=False,
            )
        lengths = loads.lengths(len(x_NK))
        runs = map(RoundedRows, x.values.split(lengths), x.inverse.split(lengths))
        matrices = map(RoundedRows, weight.values.unbind(), weight.inverse.unbind())
        outputs = [
            product_of_rounded(run, matrix, dtype)
            for run, matrix in zip(runs, matrices, strict=True)
            if len(run.values)
        ]
        return torch.cat(outputs) if outputs else x_NK.new_zeros(0, weight_EMK.shape[1])


def use_fp8_experts(experts: nn.Module, name: str) -> None:
    """Have the matrices that a parameter of experts holds compute in fp8 from now on."""
    vars(experts).setdefault(PRODUCTS, {})[name] = Fp8ExpertProduct()


def share_expert_rows(experts: nn.Module, name: str, largest: Largest, *, dim: int) -> None:
    """Have experts whose matrices ranks share take scales over all of them, if they compute in fp8.

    Args:
        dim: of the parameter of this name that the ranks share.
    """
    if not isinstance(expert_product(experts, name), Fp8ExpertProduct):
        return
    has_inputs_last = not getattr(experts, "is_transposed", False)
    if (dim == 2) == has_inputs_last:
        product = Fp8ExpertProduct(largest_in=largest)
    else:
        product = Fp8ExpertProduct(largest_out=largest)
    vars(experts)[PRODUCTS][name] = product


def fp8_expert_linear(
    x_NK: Tensor,
    weight_EMK: Tensor,
    loads: ExpertLoads,
    bias_EM: Tensor | None,
    product: Fp8ExpertProduct,
) -> Tensor:
    """x W^T + b of each expert's tokens; modes see one function of torch, as `F.linear` is one."""
    if has_torch_function((x_NK, weight_EMK)):
        out: Tensor = handle_torch_function(
            fp8_expert_linear, (x_NK, weight_EMK), x_NK, weight_EMK, loads, bias_EM, product
        )
        return out
    y: Tensor = _Fp8ExpertLinear.apply(x_NK, weight_EMK, loads, product)  # type: ignore[no-untyped-call]
    return y if bias_EM is None else y + expert_bias(x_NK, weight_EMK, loads, bias_EM)


class _Fp8ExpertLinear(torch.autograd.Function):
    """x W^T; backward: the gradient of x by fp8, that of W in the type of the operands."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, loads: ExpertLoads, product: Fp8ExpertProduct
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.loads = loads
        ctx.product = product
        return product.output(x, weight, loads)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dx = None
        d_weight = None
        if is_asked_for(ctx, 0):
            dx = ctx.product.input_gradient(dy, weight, ctx.loads)
        if is_asked_for(ctx, 1):
            d_weight = expert_weight_gradient(dy, x, weight, ctx.loads)
        return dx, d_weight, None, None
