"""Buffers of replicas, such as the running statistics of BatchNorm: every rank gets the first rank's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis


@torch.no_grad()
def broadcast_buffers(module: nn.Module, comm: Comm, axis: Axis, *, root: int = 0) -> None:
    """Give every rank of `axis` the values that the rank `root` (the first one) has of the buffers that a state dict has; a
    collective, one message for each dtype.

    Forwards change buffers by the samples that a rank has seen, so those of replicas differ until
    then. What state dicts leave out is computed from other values, and stays as it is.
    """
    if comm.degree(axis) == 1:
        return
    alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
    for buffer in stored_buffers(module):
        alike[buffer.dtype, buffer.device].append(buffer)
    for buffers in alike.values():
        flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
        comm.broadcast_(flat, axis, root=root)
        parts = flat.split([buffer.numel() for buffer in buffers])
        for buffer, part in zip(buffers, parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


def stored_buffers(module: nn.Module) -> Iterator[Tensor]:
    """The buffers with entries that the state dict has, each once."""
    seen: set[int] = set()
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is None or name in each._non_persistent_buffers_set:
                continue
            if id(buffer) in seen or buffer.is_meta or buffer.numel() == 0:
                continue
            seen.add(id(buffer))
            yield buffer
