"""Text across ranks: gather or broadcast strings, and raise a checkpoint error on every rank together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.errors import CheckpointError, Fault

PADDING = 0xFF
"""A byte that UTF-8 does not use."""


def all_gather_text(comm: Comm, text: str) -> tuple[str, ...]:
    """The text of every rank of the mesh, in rank order; every rank must call it."""
    encoded = torch.tensor(list(text.encode()), dtype=torch.uint8, device=comm.device)
    local_length = torch.tensor([len(encoded)], device=comm.device)
    longest = int(comm.combine_world(local_length, _largest))
    if not longest:
        return ("",) * comm.mesh.size
    padded = torch.full((longest,), PADDING, dtype=torch.uint8, device=comm.device)
    padded[: len(encoded)] = encoded
    rows = comm.all_gather_world(padded.unsqueeze(0)).cpu()
    padding = bytes([PADDING])
    return tuple(bytes(row.tolist()).rstrip(padding).decode() for row in rows)


def broadcast_text(comm: Comm, text: str) -> str:
    """The text of rank 0 on every rank; every rank must call it."""
    local = text.encode() if comm.rank == 0 else b""
    local_length = torch.tensor([len(local)], device=comm.device)
    length = int(comm.combine_world(local_length, _largest))
    row = torch.zeros(length, dtype=torch.uint8, device=comm.device)
    if comm.rank == 0:
        row.copy_(torch.tensor(list(local), dtype=torch.uint8))
    return bytes(comm.combine_world(row, _largest).tolist()).decode()


def _largest(rows: Tensor) -> Tensor:
    return rows.amax(0)


def raise_on_all_ranks(comm: Comm, action: Callable[[], None]) -> None:
    """Call `action` on every rank; where it raises a CheckpointError on one rank, raise one on all
    ranks.

    Raises:
        CheckpointError: this rank's own error, or a report of the error of the lowest failing rank.
    """
    faults: tuple[Fault, ...] = ()
    try:
        action()
    except CheckpointError as error:
        faults = error.faults
    texts = all_gather_text(comm, "; ".join(str(fault) for fault in faults))
    if faults:
        raise CheckpointError(*faults)
    for rank, text in enumerate(texts):
        if text:
            raise CheckpointError(
                Fault("resume", f"rank {rank} ({comm.mesh.coord_text(rank)}) failed: {text}")
            )
