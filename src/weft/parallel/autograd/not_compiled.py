"""Marks functions that torch.compile leaves out, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Have torch.compile leave a function out, as `torch.compiler.disable` does, which imports the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function
