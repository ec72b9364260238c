"""Owns making modules that have shapes and no values: nothing is allocated, nothing is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

T = TypeVar("T")


class NoInit(TorchFunctionMode):
    """While it is active, `torch.nn.init` leaves tensors as they are.

    The values of a skeleton are never looked at, and drawing them is dear: on the meta device `nn.init.normal_` goes
    through `torch._refs`, which imports torch._dynamo: 829 modules, a second of computing in every rank.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


def skeleton(make: Callable[[], T]) -> T:
    """What `make()` builds, on the meta device."""
    with torch.device("meta"), NoInit():
        return make()
