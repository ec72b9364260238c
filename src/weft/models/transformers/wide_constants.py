"""Constants of code that names no type, in a model of float64: of float64, as where that is torch's default."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class WideConstants(TorchFunctionMode):
    """While it is active, `torch.full` of a float makes one of float64: the least float64, by which
    XGLM bounds scores, is no float32.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of `func`."""
        kwargs = kwargs or {}
        if func is torch.full and isinstance(args[-1], float):
            kwargs = {"dtype": torch.float64, **kwargs}
        return func(*args, **kwargs)
