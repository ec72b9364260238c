"""Changes of functions and modules that several mutants share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.prove.mutants.fault import FunctionChange


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
