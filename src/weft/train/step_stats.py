"""Statistics of a training step: each rank's numbers, and their totals over all ranks, equal on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.dimension import exact_axes, local_update_axes
from weft.core.machine_memory import resident_bytes
from weft.parallel.pp import AXIS as PP
from weft.train.rewards import Rewards


@dataclass(frozen=True)
class RankStats:
    """Numbers of one rank.

    Attributes:
        loss: this rank's part of the summed loss, float64 scalar; 0 on ranks that only hold a copy.
        grad_sq_norm: this rank's part of the squared gradient norm, float64 scalar.
        mem_bytes: memory of this rank.
        expert_load: largest over mean load of an expert, scalar; 0 without experts.
        status: status flags for the other ranks.
        rewards: this rank's part of sums of rewards, then z0 on the first rank, float64; None: the loss
            is not of answers.
    """

    loss: Tensor
    grad_sq_norm: Tensor
    mem_bytes: int
    expert_load: Tensor
    status: int
    rewards: Tensor | None = None


@dataclass(frozen=True)
class StepTotals:
    """Numbers of a step over all ranks.

    Attributes:
        loss: mean over all target tokens; where replicas train apart, the mean of their losses.
        targets: number of target tokens.
        grad_norm: global gradient norm, scaled like the gradients; where replicas train apart, the
            mean of their norms.
        grad_norm_tensor: the norm of this rank's replica on the device, float64 scalar.
        mem_bytes: per pipeline rank, the largest memory of its ranks.
        expert_load: largest over mean load of an expert, in the worst block; None without experts.
        status: status flags that any rank has set.
        rewards: of the answers of the step; None: the loss is not of answers.
    """

    loss: float
    targets: int
    grad_norm: float
    grad_norm_tensor: Tensor
    mem_bytes: tuple[int, ...]
    expert_load: float | None
    status: int
    rewards: Rewards | None = None


NUM_REPLICA_SUMS = 3
"""Columns for each of several replicas that train apart: loss, squared norm, targets."""
NUM_FLAGS = 8
"""Status flags of a rank: those of saves, and of snapshots in memory."""
LEAST_TARGETS = 2.0**-10
"""In place of 0, so that a step without targets has loss 0; rounded down, also the sum over sites, it is none."""


# Note [One synchronisation a step]
# A number that the host reads from a CUDA device makes it wait for all that was launched before, and a tensor made from
# numbers of the host is a copy that waits too. So a step reads all its numbers in one copy, and numbers of the host are
# written into a row on the device by `fill_`, whose value travels with the launch.


class PendingTotals:
    """Totals of a step on the device.

    Attributes:
        grad_norm_tensor: the norm of this rank's replica, float64 scalar.
    """

    def __init__(
        self, comm: Comm, numbers: Tensor, grad_norm_tensor: Tensor, *, num_rewards: int = 0
    ) -> None:
        self.grad_norm_tensor = grad_norm_tensor
        self._num_rewards = num_rewards
        self._comm = comm
        self._numbers: Tensor | None = numbers
        self._arrived: torch.cuda.Event | None = None

    @property
    def is_not_finite(self) -> Tensor:
        """1 if the loss or the norm is not finite, else 0; float32 scalar on the device."""
        assert self._numbers is not None, "the numbers were read"
        loss, _, norm = self._numbers[:3]
        return torch.isfinite(loss + norm).logical_not().float()

    def start_reading(self) -> None:
        """Copy to the host behind what was launched so far, without a wait."""
        if self._numbers is not None and self._numbers.is_cuda:
            # Torch takes pinned memory for it; nothing may read it before the event behind the copy.
            self._numbers = self._numbers.to("cpu", non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()

    def read(self) -> StepTotals:
        """Wait for the numbers, once.

        Raises:
            CommError: a call on the device was aborted, so the numbers mean nothing.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        assert self._numbers is not None, "they are read once"
        loss, num_targets, norm, *numbers = self._numbers.tolist()
        rewards = numbers[: self._num_rewards]
        expert_load, *rest = numbers[self._num_rewards :]
        self._numbers = None
        # A call that was aborted on the device has left anything in the numbers.
        self._comm.check_connections()
        return StepTotals(
            loss=loss,
            targets=int(num_targets),
            grad_norm=norm,
            grad_norm_tensor=self.grad_norm_tensor,
            mem_bytes=tuple(int(num_bytes) for num_bytes in rest[NUM_FLAGS:]),
            expert_load=expert_load or None,
            status=sum(1 << bit for bit in range(NUM_FLAGS) if rest[bit]),
            rewards=Rewards.of_sums(rewards) if rewards else None,
        )


def total_stats(comm: Comm, local: RankStats, targets: Tensor) -> PendingTotals:
    """Totals over all ranks; every rank must call it, and gets the same bits, but for
    `grad_norm_tensor` where replicas train apart.

    One row of each rank: loss, squared norm (of replicas that train apart: loss, squared norm,
    targets of each), sums of rewards | expert load, a column for each status flag, a column for the memory of each
    pipeline rank. See Note [One synchronisation a step].

    Args:
        targets: target tokens over all ranks of this rank's replica, float64 scalar.
    """
    maxima = torch.zeros(1 + NUM_FLAGS + comm.degree(PP), dtype=torch.float64, device=comm.device)
    maxima[0].copy_(local.expert_load)
    for bit in range(NUM_FLAGS):
        if local.status >> bit & 1:
            maxima[1 + bit].fill_(1)
    memory_column = 1 + NUM_FLAGS + comm.index(PP)
    maxima[memory_column].fill_(local.mem_bytes)
    sums = _sums_of_rank(comm, local, targets)
    rewards = [] if local.rewards is None else [local.rewards]  # no launch where there are none
    num_rewards = sum(map(len, rewards))
    combine = partial(_combine_rows, num_sums=len(sums) + num_rewards)
    row = comm.combine_world(torch.cat((sums, *rewards, maxima)), combine)
    means = _means(comm, row[: len(sums)], targets)
    derived = torch.stack((means.loss, means.targets, means.grad_norm))
    numbers = torch.cat((derived, row[len(sums) :]))
    return PendingTotals(comm, numbers, means.own_grad_norm, num_rewards=num_rewards)


def _sums_of_rank(comm: Comm, local: RankStats, targets: Tensor) -> Tensor:
    """This rank's part of the columns that are summed."""
    replica_axes = local_update_axes()
    num_replicas = comm.degree(replica_axes)
    if num_replicas == 1:
        return torch.stack((local.loss, local.grad_sq_norm))
    is_first = comm.index(exact_axes()) == 0
    if not is_first:
        # All ranks of a replica have its whole number; one of them adds it.
        targets = torch.zeros_like(targets)
    own_sums = torch.stack((local.loss, local.grad_sq_norm, targets))
    table = targets.new_zeros((num_replicas, NUM_REPLICA_SUMS))
    replica = comm.index(replica_axes)
    table[replica] = own_sums
    return table.flatten()


@dataclass(frozen=True)
class _Means:
    """Loss, targets and norm for the log, and the norm of this rank's replica; scalars on the device."""

    loss: Tensor
    targets: Tensor
    grad_norm: Tensor
    own_grad_norm: Tensor


def _means(comm: Comm, sums: Tensor, targets: Tensor) -> _Means:
    """What the summed columns say; of replicas that train apart the means."""
    replica_axes = local_update_axes()
    num_replicas = comm.degree(replica_axes)
    if num_replicas == 1:
        loss_sum, grad_sq_norm = sums.unbind()
        grad_norm = grad_sq_norm.sqrt()
        return _Means(
            loss=loss_sum / targets, targets=targets, grad_norm=grad_norm, own_grad_norm=grad_norm
        )
    table = sums.view(num_replicas, NUM_REPLICA_SUMS)
    loss_sums, grad_sq_norms, targets_of = table.unbind(1)
    losses = loss_sums / targets_of
    grad_norms = grad_sq_norms.sqrt()
    own_norm = grad_norms[comm.index(replica_axes)]
    return _Means(
        loss=losses.mean(),
        targets=targets_of.sum(),
        grad_norm=grad_norms.mean(),
        own_grad_norm=own_norm,
    )


def _combine_rows(rows: Tensor, *, num_sums: int) -> Tensor:
    sums = rows[:, :num_sums].sum(0)
    maxima = rows[:, num_sums:].amax(0)
    return torch.cat((sums, maxima))


def take_peak_bytes(device: torch.device) -> int:
    """As `memory_bytes`; on CUDA the peak since the last call."""
    num_bytes = memory_bytes(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    return num_bytes


def memory_bytes(device: torch.device) -> int:
    """Memory of this rank: peak allocated bytes on CUDA, resident set of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resident_bytes()
