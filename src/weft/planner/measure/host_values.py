"""What the host reads of tensors on the meta device, which have no values: ones."""

from __future__ import annotations

from typing import Any

import torch

aten = torch.ops.aten


def value_on_host(func: Any, args: Any, kwargs: Any) -> Any:
    """What a call reads of a tensor on the meta device: ones; None for a call that reads none."""
    is_read = func is aten._local_scalar_dense.default
    is_copy = func is aten._to_copy.default
    if not (is_read or is_copy) or not args[0].is_meta:
        return None
    x = args[0]
    if is_read:
        return 1.0 if x.is_floating_point() else 1
    target = kwargs.get("device")
    if target is None or torch.device(target).type != "cpu":
        return None
    return torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype, device="cpu")
