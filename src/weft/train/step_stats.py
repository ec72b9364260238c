"""Statistics of a training step: each rank's numbers, and their totals over all ranks, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from weft.comm.comm import Comm
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
        status: status flags that any rank has set.
    """

    loss: Tensor
    grad_norm: Tensor
    mem_bytes: tuple[int, ...]
    expert_load: float | None
    status: int


NUM_SUMS = 2
"""Columns of a row of statistics that are summed over ranks; of the others the largest counts."""
NUM_FLAGS = 8
"""Status flags of a rank: those of saves, and of snapshots in memory."""


def total_stats(comm: Comm, local: RankStats) -> StepTotals:
    """Totals over all ranks; every rank must call it, and gets the same bits.

    One row of each rank: loss, squared norm | expert load, a column for each status flag, a column
    for the memory of each pipeline rank.
    """
    flags = [bool(local.status >> bit & 1) for bit in range(NUM_FLAGS)]
    stage_mem_bytes = [0] * comm.degree(PP)
    stage_mem_bytes[comm.index(PP)] = local.mem_bytes
    host_numbers = [local.expert_load, *flags, *stage_mem_bytes]
    maxima = torch.tensor(host_numbers, dtype=torch.float64, device=comm.device)
    sums = torch.stack((local.loss, local.grad_sq_norm))
    row = comm.combine_world(torch.cat((sums, maxima)), _combine_rows)
    loss, grad_sq_norm = row[:NUM_SUMS].unbind()
    expert_load, *rest = row[NUM_SUMS:].tolist()
    return StepTotals(
        loss=loss,
        grad_norm=grad_sq_norm.sqrt(),
        mem_bytes=tuple(int(num_bytes) for num_bytes in rest[NUM_FLAGS:]),
        expert_load=expert_load or None,
        status=sum(1 << bit for bit in range(NUM_FLAGS) if rest[bit]),
    )


def _combine_rows(rows: Tensor) -> Tensor:
    return torch.cat((rows[:, :NUM_SUMS].sum(0), rows[:, NUM_SUMS:].amax(0)))


def memory_bytes(device: torch.device) -> int:
    """Memory of this rank: peak allocated bytes on CUDA, resident set of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
