"""Text across ranks: gather or broadcast strings, and raise a checkpoint error on every rank together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.errors import CheckpointError, Fault

PADDING = b"\xff"
"""A byte that UTF-8 does not use."""
SURROGATES = "surrogatepass"
"""Halves of surrogate pairs pass, which stand for bytes in names of files that are no text: an error
of one rank would leave the others waiting.
"""


def all_gather_text(comm: Comm, text: str) -> tuple[str, ...]:
    """The text of every rank of the mesh, in rank order; every rank must call it."""
    encoded = text.encode(errors=SURROGATES)
    # rows of one length: a collective needs equal shapes on all ranks
    length = _longest(comm, len(encoded))
    # the same on all ranks, so all of them leave out the second call
    if length == 0:
        return ("",) * comm.mesh.size
    row = _bytes_as_tensor(comm, encoded.ljust(length, PADDING))
    rows = comm.all_gather_world(row.unsqueeze(0))
    return tuple(
        bytes(received.tolist()).rstrip(PADDING).decode(errors=SURROGATES)
        for received in rows.cpu()
    )


def broadcast_text(comm: Comm, text: str) -> str:
    """The text of rank 0 on every rank; every rank must call it."""
    encoded = text.encode(errors=SURROGATES) if comm.rank == 0 else b""
    length = _longest(comm, len(encoded))
    row = _bytes_as_tensor(comm, encoded.ljust(length, b"\0"))  # the largest byte of all ranks
    received = comm.combine_world(row, _largest)
    return bytes(received.tolist()).decode(errors=SURROGATES)


def _longest(comm: Comm, length: int) -> int:
    """The largest of the numbers of all ranks."""
    local = torch.tensor([length], device=comm.device)
    largest = comm.combine_world(local, _largest)
    return int(largest)


def _bytes_as_tensor(comm: Comm, content: bytes) -> Tensor:
    return torch.tensor(list(content), dtype=torch.uint8, device=comm.device)


def _largest(rows: Tensor) -> Tensor:
    return rows.amax(0)


def raise_on_all_ranks(comm: Comm, action: Callable[[], None], *, key: str = "resume") -> None:
    """Call `action` on every rank; where it raises a CheckpointError on one rank, raise one on all
    ranks.

    Args:
        key: what failed, in the report.

    Raises:
        CheckpointError: this rank's own error, or a report of the error of the lowest failing rank.
    """
    faults: tuple[Fault, ...] = ()
    try:
        action()
    except CheckpointError as error:
        faults = error.faults
    # every rank comes here, whether its own action failed or not
    texts = all_gather_text(comm, "; ".join(map(str, faults)))
    if faults:
        raise CheckpointError(*faults)
    for rank, text in enumerate(texts):
        if text:
            place = comm.mesh.coord_text(rank)
            fault = Fault(key, f"rank {rank} ({place}) failed: {text}")
            raise CheckpointError(fault)
