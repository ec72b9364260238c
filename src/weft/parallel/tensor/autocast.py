"""Casts under `torch.autocast`, as it makes them for torch's own linears: autograd functions are not cast by it."""

from __future__ import annotations

import torch
from torch import Tensor


def autocast(tensor: Tensor) -> Tensor:
    """The tensor in the dtype of the autocast that is on; as it is where none is, or in float64."""
    device = tensor.device.type
    has_autocast = torch.amp.is_autocast_available(device)  # not on the meta device
    if not has_autocast or not torch.is_autocast_enabled(device):
        return tensor
    if not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device))
