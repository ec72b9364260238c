"""Functions compiled by torch.compile with weft's settings; the compiler is imported at the first call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

BACKEND = "inductor"
LEFT_OUT = "left_out"
"""Attribute of classes of modules, and of implementations of attention: names of their methods that compiled
code calls as they are written. What they do depends on the values of a batch, so there would be a graph for
each; or they wait for other ranks while they compute.
"""
_compiler_lock = threading.Lock()
"""Held while the compiler is imported, whose modules import each other in a circle: by one rank thread."""
MOST_KINDS = 64
"""Graphs that one function may have: one for each kind of layer and shape of batch."""


def compile_function(
    function: Callable[..., Any], device: torch.device, *, recomputes: bool = False
) -> Callable[..., Any]:
    """The function compiled for the shapes that it is called with, its backward in the first call, too:
    errors of the compiler are those of a call, and none comes out of a backward.

    Args:
        recomputes: whether its backward recomputes what is cheap to recompute, in place of saving it.
    """
    with _compiler_lock:
        from torch._dynamo import config as dynamo  # late: 800 modules
        from torch._functorch import config as autograd
        from torch._inductor import config as inductor

        # settings of the process, and never set back: other code that compiles has them as well
        autograd.force_non_lazy_backward_lowering = True
        dynamo.recompile_limit = max(dynamo.recompile_limit, MOST_KINDS)
        if device.type == "cpu":
            inductor.compile_threads = 1  # else in processes that it starts
        backend = _recomputing_backend if recomputes else BACKEND
        compiled: Callable[..., Any] = torch.compile(function, dynamic=False, backend=backend)
        return compiled


def _recomputing_backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
    """Compile a graph of which no result is saved that fused operations yield from saved ones. The compiler
    would save some of them to compute less; matrix products, attention and collectives it never repeats.
    """
    from torch._dynamo import lookup_backend
    from torch._functorch import config

    saves_less = config.patch(
        ban_recompute_used_far_apart=False,
        ban_recompute_long_fusible_chains=False,
        ban_recompute_materialized_backward=False,
    )
    with saves_less:
        return lookup_backend(BACKEND)(graph, inputs)


def leave_out(block: nn.Module) -> None:
    """Have compiled code of a block call what its parts leave out as it is written. A mark alone does not
    make torch's compiler leave a function out.
    """
    for module in block.modules():
        for part in (module, getattr(module, "implementation", None)):
            for kind in type(part).__mro__:
                for name in vars(kind).get(LEFT_OUT, ()):
                    method = vars(kind)[name]
                    if not hasattr(method, "_torchdynamo_disable"):
                        setattr(kind, name, torch.compiler.disable(method))
