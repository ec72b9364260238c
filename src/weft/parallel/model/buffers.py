"""Buffers of replicas, such as the running statistics of BatchNorm: every rank gets the first rank's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.errors import Fault, PlanError


class BufferBroadcast:
    """Gives every rank the buffers of one of them, again and again.

    A buffer that holds those values already is not written: a graph that has saved it, such as a table of
    rotations, can still run backward.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._versions: dict[int, int] = {}

    def before_forward(self, module: nn.Module) -> None:
        """Note the buffers that the first forward of a step begins with."""
        if not self._versions:
            self._buffers = self._buffers or list(stored_buffers(module))
            self._versions = {id(buffer): buffer._version for buffer in self._buffers}

    @torch.no_grad()
    def __call__(self, module: nn.Module, comm: Comm, axis: Axis, *, root: int = 0) -> None:
        """Give every rank of `axis` the values that the rank `root` (the first one) has of the buffers that a
        state dict has; a collective, one message for each dtype.

        Forwards change buffers by the samples that a rank has seen, so those of replicas differ until
        then. What state dicts leave out is computed from other values, and stays as it is.
        """
        if comm.degree(axis) == 1:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = defaultdict(list)
        # Listed anew: a forward may have put other tensors in their place.
        self._buffers = list(stored_buffers(module))
        for buffer in self._buffers:
            alike[buffer.dtype, buffer.device].append(buffer)
        for buffers in alike.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            comm.broadcast_(flat, axis, root=root)
            if comm.index(axis) == root:
                continue
            parts = flat.split([buffer.numel() for buffer in buffers])
            for buffer, part in zip(buffers, parts, strict=True):
                values = part.view(buffer.shape)
                # What a forward has written is copied without a comparison, for which a GPU would be waited for.
                was_written = self._versions.get(id(buffer)) != buffer._version
                if was_written or not torch.equal(buffer, values):
                    buffer.copy_(values)
        self._versions.clear()


@torch.no_grad()
def broadcast_first(tensor: Tensor, comm: Comm, axis: Axis) -> None:
    """Give every rank of `axis` the first rank's values of a tensor, which may be sparse (coordinates), such as the
    adjacency matrix of a graph.

    Raises:
        PlanError: it has another sparse layout.
    """
    if tensor.layout == torch.strided:
        comm.broadcast_(tensor, axis, root=0)
        return
    if tensor.layout != torch.sparse_coo:
        what = f"a parameter or buffer of shape {list(tensor.shape)} has a layout that is not broadcast"
        fault = Fault("module", what, got=str(tensor.layout), fix="tensor.to_sparse_coo()")
        raise PlanError(fault)
    own = tensor.coalesce()
    count = torch.tensor([own.values().shape[0]], device=comm.device)
    length = int(comm.broadcast_(count, axis, root=0).item())
    parts = [own.indices(), own.values().contiguous()]
    if length != own.values().shape[0]:  # on the first rank never
        parts = [
            parts[0].new_empty(parts[0].shape[0], length),
            parts[1].new_empty(length, *parts[1].shape[1:]),
        ]
    indices, values = (comm.broadcast_(part.contiguous(), axis, root=0) for part in parts)
    first = torch.sparse_coo_tensor(
        indices, values, tensor.shape, is_coalesced=True, check_invariants=False
    )
    tensor.copy_(first)


def stored_buffers(module: nn.Module) -> Iterator[Tensor]:
    """The dense buffers with entries that the state dict has, each once."""
    seen: set[int] = set()
    for each in module.modules():
        for name, buffer in each._buffers.items():
            if buffer is None or name in each._non_persistent_buffers_set:
                continue
            if buffer.layout != torch.strided:
                continue
            if id(buffer) in seen or buffer.is_meta or buffer.numel() == 0:
                continue
            seen.add(id(buffer))
            yield buffer
