"""Functions compiled by torch.compile with weft's settings; the compiler is imported at the first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

MOST_KINDS = 64
"""Graphs that one function may have: one for each kind of layer and shape of batch."""


def compile_function(function: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """The function compiled for the shapes that it is called with, its backward in the first call, too:
    errors of the compiler are those of a call, and none comes out of a backward.
    """
    from torch._dynamo import config as dynamo  # late: 800 modules
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    autograd.force_non_lazy_backward_lowering = True
    dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_KINDS)
    if device.type == "cpu":
        inductor.compile_threads = 1  # else in processes that it starts
    compiled: Callable[..., Any] = torch.compile(function, dynamic=False)
    return compiled
