"""Casts inside a forward: the coarsest number type in which something that depends on parameters is computed."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from weft.models.common.uncompiled import uncompiled_mode
from weft.parallel.autograd.tree import tensors_in


@uncompiled_mode
class Casts(TorchDispatchMode):
    """Finds the coarsest number type of results of finer operands that depend on parameters.

    Attributes:
        coarsest: None: nothing was cast.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.coarsest: torch.dtype | None = None

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operation."""
        used = {x.dtype for x in tensors_in((args, kwargs)) if x.is_floating_point()}
        if len(used) > 1 and func.overloadpacket in flop_registry:
            names = " and ".join(sorted(map(str, used)))  # the meta device computes it all the same
            raise TypeError(f"a product of {names}")
        out = func(*args, **(kwargs or {}))
        trained = [x.dtype for x in tensors_in((args, kwargs)) if x.requires_grad]
        for x in tensors_in(out):
            if trained and x.is_floating_point() and eps(x.dtype) > max(map(eps, trained)):
                self.coarsest = max(self.coarsest or x.dtype, x.dtype, key=eps)
        return out


def eps(dtype: torch.dtype) -> float:
    """Distance of the numbers of a type at 1."""
    return torch.finfo(dtype).eps
