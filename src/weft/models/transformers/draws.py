"""Random numbers that routers of transformers draw in training, by counter: the same on every layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from weft.models.common.dropout import uniform_like


class DrawsByCounter(TorchFunctionMode):
    """A forward in which these functions of torch draw by counter; see Note [Counter-based dropout].

    Attributes:
        is_used: whether one was called.
    """

    is_used = False

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called by torch in place of `func`."""
        replacement = REPLACEMENTS.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        self.is_used = True
        return replacement(*args, **(kwargs or {}))


def _exponential(x: Tensor, lambd: float = 1.0, **_generator: object) -> Tensor:
    return x.copy_(-uniform_like(x).log() / lambd)


def _uniform(x: Tensor, low: float = 0.0, high: float = 1.0, **_generator: object) -> Tensor:
    return x.copy_(uniform_like(x).mul_(high - low).add_(low))


def _rand_like(x: Tensor, **options: Any) -> Tensor:
    return torch.empty_like(x, **options).copy_(uniform_like(x))


REPLACEMENTS: Mapping[Callable[..., Any], Callable[..., Tensor]] = {
    Tensor.exponential_: _exponential,
    Tensor.uniform_: _uniform,
    torch.rand_like: _rand_like,
}
"""Functions that draw random numbers -> what is called in their place."""
