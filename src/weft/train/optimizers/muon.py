"""Muon: momentum, orthogonalised as a whole matrix by Newton-Schulz iterations, as torch.optim.Muon computes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from weft.train.optimizers.contract import Kind, Optimizer, State, StateAxes

LrAdjustment = Literal["original", "match_rms_adamw"]


class Muon(Optimizer):
    """Options and arithmetic of torch.optim.Muon, on logical matrices.

    Directions are gathered in bfloat16: the iterations round them to it anyway, so the result is
    the same and half of the bytes of float32 are sent.

    Args:
        momentum: decay rate of the gradient's average.
        nesterov: whether the direction is the gradient interpolated with the momentum.
        ns_coefficients: a, b, c of the quintic iteration.
        ns_steps: iterations.
        eps: smallest norm that a direction is divided by.
        adjust_lr_fn: factor of the learning rate of a matrix [A, B]: sqrt(max(1, A / B)), or
            0.2 sqrt(max(A, B)), with which AdamW's learning rate fits.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; Liu et
    al. 2025, "Muon is Scalable for LLM Training".
    """

    kind: ClassVar[Kind] = "whole_matrix"
    states: ClassVar[Mapping[str, StateAxes]] = {"momentum_buffer": "entries"}

    def __init__(
        self,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        ns_steps: int = 5,
        eps: float = 1e-7,
        adjust_lr_fn: LrAdjustment = "original",
    ) -> None:
        self.momentum = momentum
        self.nesterov = nesterov
        self.ns_coefficients = ns_coefficients
        self.ns_steps = ns_steps
        self.eps = eps
        self.adjust_lr_fn = adjust_lr_fn

    def direction(self, grad: Tensor, state: State) -> Tensor:
        """The momentum, or the gradient interpolated with it."""
        momentum = state["momentum_buffer"]
        momentum.lerp_(grad, 1 - self.momentum)
        if self.nesterov:
            return grad.lerp(momentum, self.momentum)
        return momentum

    def gather_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """bfloat16, in which the iterations compute."""
        return torch.bfloat16

    def transform(self, matrix: Tensor) -> Tensor:
        """An approximation of U V^T, where U S V^T is the singular value decomposition."""
        a, b, c = self.ns_coefficients
        is_tall = matrix.size(0) > matrix.size(1)
        x = matrix.bfloat16()
        if is_tall:
            x = x.T
        norm = x.norm().clamp(min=self.eps)
        x = x / norm
        for _ in range(self.ns_steps):
            gram = x @ x.T
            polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)
        if is_tall:
            x = x.T
        return x

    def apply(
        self,
        param: Tensor,
        direction: Tensor,
        *,
        lr: float,
        weight_decay: float,
        shape: tuple[int, int],
    ) -> None:
        """Decoupled weight decay, then a step against the direction."""
        param.mul_(1 - lr * weight_decay)
        param.add_(direction, alpha=-lr * self.lr_factor(shape))

    def lr_factor(self, shape: tuple[int, int]) -> float:
        """Factor of the learning rate of a matrix of this shape."""
        num_rows, num_columns = shape
        if self.adjust_lr_fn == "match_rms_adamw":
            return 0.2 * math.sqrt(max(num_rows, num_columns))
        return math.sqrt(max(1, num_rows / num_columns))
