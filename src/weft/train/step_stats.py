"""Statistics of a training step: each rank's numbers, gathered by one collective and totalled alike on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.parallel.pp import AXIS as PP


@dataclass(frozen=True)
class RankStats:
    """Numbers of one rank.

    Attributes:
        loss: this rank's part of the summed loss, float64 scalar; 0 on ranks that only hold a copy.
        grad_sq_norm: this rank's part of the squared gradient norm, float64 scalar.
        mem_bytes: memory of this rank.
        expert_load: largest over mean load of an expert; 0 without experts.
        status: status flags for the other ranks.
    """

    loss: Tensor
    grad_sq_norm: Tensor
    mem_bytes: int
    expert_load: float
    status: int


@dataclass(frozen=True)
class StepTotals:
    """Numbers of a step over all ranks.

    Attributes:
        loss: sum over all target tokens, float64 scalar.
        grad_norm: global gradient norm, float64 scalar, scaled like the gradients.
        mem_bytes: per pipeline rank, the largest memory of its ranks.
        expert_load: largest over mean load of an expert, in the worst block; None without experts.
        statuses: status flags of every rank.
    """

    loss: Tensor
    grad_norm: Tensor
    mem_bytes: tuple[int, ...]
    expert_load: float | None
    statuses: tuple[int, ...]

    @staticmethod
    def from_ranks(stats: Tensor, mesh: Mesh) -> StepTotals:
        """Totals of the rows of all ranks: every rank sums the same numbers in the same order."""
        losses, grad_sq_norms, mem_bytes, expert_loads, statuses = stats.unbind(1)
        return StepTotals(
            loss=losses.sum(),
            grad_norm=grad_sq_norms.sum().sqrt(),
            mem_bytes=_largest_per_stage(mem_bytes.tolist(), mesh),
            expert_load=expert_loads.max().item() or None,
            statuses=tuple(int(status) for status in statuses.tolist()),
        )


def all_gather_stats(comm: Comm, local: RankStats) -> Tensor:
    """The statistics of all ranks, float64 [ranks, 5], rows in rank order; every rank must call it."""
    host_numbers = (local.mem_bytes, local.expert_load, local.status)
    on_device = torch.tensor(host_numbers, dtype=torch.float64, device=comm.device)
    row = torch.stack((local.loss, local.grad_sq_norm, *on_device.unbind()))
    all_axes = tuple(name for name, _ in comm.mesh.axes)
    return comm.all_gather(row.unsqueeze(0), all_axes, dim=0)


def _largest_per_stage(mem_bytes: list[float], mesh: Mesh) -> tuple[int, ...]:
    largest = [0] * mesh.degree(PP)
    for rank, num_bytes in enumerate(mem_bytes):
        pipeline_rank = mesh.coord(rank).get(PP, 0)
        largest[pipeline_rank] = max(largest[pipeline_rank], int(num_bytes))
    return tuple(largest)


def memory_bytes(device: torch.device) -> int:
    """Memory of this rank: peak allocated bytes on CUDA, resident set of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
