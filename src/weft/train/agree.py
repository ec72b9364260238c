"""Owns a few words from rank to rank: what one says, all hear, in rank order; and faults that all ranks raise together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.comm.comm import Comm
from weft.errors import CheckpointError, Fault


def everyones_words(comm: Comm, text: str) -> tuple[str, ...]:
    """What every rank of the mesh says, by rank; all of them must ask at the same time."""
    axes = tuple(name for name, _ in comm.mesh.axes)
    mine = torch.tensor(list(text.encode()), dtype=torch.uint8, device=comm.device)
    lengths = comm.all_gather(torch.tensor([len(mine)], device=comm.device), axes).tolist()
    if not any(lengths):
        return ("",) * comm.mesh.size
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=comm.device)
    padded[: len(mine)] = mine
    rows = comm.all_gather(padded.unsqueeze(0), axes).cpu()
    return tuple(bytes(row[:length].tolist()).decode() for row, length in zip(rows, lengths, strict=True))


def words_of_first(comm: Comm, text: str) -> str:
    """What rank 0 says; all ranks must ask at the same time."""
    return everyones_words(comm, text if comm.rank == 0 else "")[0]


def agree(comm: Comm, act: Callable[[], None]) -> None:
    """Call `act` on every rank; where one finds a checkpoint at fault, all do.

    Raises:
        CheckpointError: this rank's own, or that of the first rank that had one.
    """
    faults: tuple[Fault, ...] = ()
    try:
        act()
    except CheckpointError as error:
        faults = error.faults
    words = everyones_words(comm, "; ".join(map(str, faults)))
    if faults:
        raise CheckpointError(*faults)
    for rank, text in enumerate(words):
        if text:
            raise CheckpointError(Fault("resume", f"rank {rank} ({comm.mesh.coord_text(rank)}) found: {text}"))
