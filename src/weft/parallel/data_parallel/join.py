"""Ranks with fewer batches than others: they take part in the collectives of the others, with gradients of zero."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Axis


class Attendance:
    """Which ranks of an axis still have batches: every rank says so before each synchronised forward."""

    def __init__(self, comm: Comm, axis: Axis) -> None:
        self.comm = comm
        self.axis = axis
        self.present: list[int] = list(range(comm.degree(axis)))

    def take(self, *, has_batch: bool) -> None:
        """Say whether this rank has a batch, and note which have; a collective."""
        own: Tensor = torch.tensor([int(has_batch)], device=self.comm.device)
        # Read on the host: whether this rank goes on depends on it.
        flags = self.comm.all_gather(own, self.axis).tolist()
        before = self.present
        self.present = [index for index, flag in enumerate(flags) if flag]
        if not self.present:
            self.last_present = before

    @property
    def share(self) -> float:
        """Ranks with a batch, as a share of all."""
        return len(self.present) / self.comm.degree(self.axis)
