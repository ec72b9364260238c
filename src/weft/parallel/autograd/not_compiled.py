"""Marks functions that torch.compile leaves out, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

F = TypeVar("F", bound=Callable[..., Any])


def not_compiled(function: F) -> F:
    """Have torch.compile leave a function out, and what it calls, as `torch.compiler.disable` does, which imports
    the compiler.
    """
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    skip = _FrameAction.SKIP
    set_code_exec_strategy(function.__code__, _FrameExecStrategy(skip, skip))
    return function
