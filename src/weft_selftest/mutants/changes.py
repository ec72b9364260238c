"""Changes of functions and modules that several mutants share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.train.step_stats import PendingTotals, StepTotals
from weft_selftest.mutants.fault import FunctionChange


def nothing(function: Callable[..., Any], *args: Any, **named: Any) -> None:
    """Do not call the function."""


def returns(value: Any) -> FunctionChange:
    """The function yields this value, whatever its arguments."""

    def change(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return value

    return change


def result_times(factor: float) -> FunctionChange:
    """The result is multiplied by a factor, and so are its gradients."""

    def change(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return function(*args, **named) * factor

    return change


def named_argument(name: str, value: Any) -> FunctionChange:
    """A keyword argument has another value."""

    def change(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return function(*args, **{**named, name: value})

    return change


def input_itself(function: Callable[..., Any], module: Any, x: Tensor, *args: Any) -> Tensor:
    """A module's forward yields its input."""
    return x


def gradient_times(factor: float) -> FunctionChange:
    """The result stays, its gradient is multiplied by a factor."""

    def change(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        out = function(*args, **named)
        return out * factor + (out * (1 - factor)).detach()

    return change


def without_gradient(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result has no history: what it was computed from gets no gradient."""
    out: Tensor = function(*args, **named)
    return out.detach()


def rounded_to_bfloat16(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """The result is rounded to bfloat16."""
    out: Tensor = function(*args, **named)
    return out.to(torch.bfloat16).to(out.dtype)


class ChangedTotals(PendingTotals):
    """Totals of a step whose numbers change when they are read.

    Args:
        totals: those of the step.
        change: from the numbers that were read to those that the step uses.
        grad_norm_tensor: the norm by which gradients are clipped, if it changes, too.
    """

    def __init__(
        self,
        totals: PendingTotals,
        change: Callable[[StepTotals], StepTotals],
        grad_norm_tensor: Tensor | None = None,
    ) -> None:
        vars(self).update(vars(totals))  # what is pending stays; only `read` differs
        if grad_norm_tensor is not None:
            self.grad_norm_tensor = grad_norm_tensor
        self._change = change

    def read(self) -> StepTotals:
        """The changed numbers."""
        return self._change(super().read())
