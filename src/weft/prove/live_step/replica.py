"""The ranks that train one replica of a model together, and their sequences: all ranks, or those of one site."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.comm.comm import Comm
from weft.core.dimension import exact_axes, local_update_axes


@dataclass(frozen=True)
class ReplicaOfRank:
    """The replica of one rank.

    Attributes:
        global_size: sequences of a step over all replicas.
    """

    comm: Comm
    global_size: int

    @property
    def num_replicas(self) -> int:
        """Replicas that train apart between outer steps; 1 without sites."""
        return self.comm.degree(local_update_axes())

    @property
    def num_ranks(self) -> int:
        """Ranks of the replica."""
        return self.comm.degree(exact_axes())

    @property
    def rank(self) -> int:
        """Index of this rank among those of the replica."""
        return self.comm.index(exact_axes())

    @property
    def num_sequences(self) -> int:
        """Sequences of a step that the replica trains on."""
        return self.global_size // self.num_replicas

    @property
    def sequences(self) -> slice:
        """These sequences in a step: replica k of n has the k-th part."""
        first = self.comm.index(local_update_axes()) * self.num_sequences
        return slice(first, first + self.num_sequences)

    def logged(self, *, loss: float, norm: float, targets: int) -> tuple[float, float, int]:
        """What a log shows for these numbers of each replica: mean loss, mean norm and the sum of the
        targets; every rank of the mesh must call it.
        """
        row = torch.tensor([loss, norm, targets], dtype=torch.float64, device=self.comm.device)
        if self.rank != 0:
            row.zero_()
        losses, norms, total = self.comm.sum_world(row).tolist()
        return losses / self.num_replicas, norms / self.num_replicas, int(total)


def any_rank(comm: Comm, flag: bool) -> bool:
    """Whether the flag is set on any rank of the mesh; every rank must call it."""
    row = torch.tensor([float(flag)], device=comm.device)
    return bool(comm.combine_world(row, lambda rows: rows.amax(0)) > 0)
