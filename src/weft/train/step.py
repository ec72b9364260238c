"""Owns the one training step: play, finish gradients, clip, update, report."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psutil
import torch
from torch import Tensor

from weft.core.axes import data_axes
from weft.models.common.batch import Batch
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.pipeline.player import ActionCallback, Player
from weft.parallel.zero import grad_norm
from weft.parallel.zero.grouping import make_gradient_reducer
from weft.train.balance import imbalance, rebalance_routers, sum_loads
from weft.train.optim import Optimizer
from weft.train.precision import LossScale


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did, the same on every rank.

    Attributes:
        loss: mean over the target tokens of the whole step, nats.
        grad_norm: global norm before clipping, of the gradients as they are without a loss scale.
        targets: target tokens that counted, over all ranks.
        step_s: seconds from the first action to the end of the update, on this rank.
        mem_bytes: per pipeline stage rank, the largest memory of its ranks (resident set on CPU, peak allocated on CUDA).
        loss_scale: factor of the loss under which the gradients were computed; 1 but for float16.
        skipped: whether the parameters were left as they are, because gradients overflowed at that scale.
        expert_load: largest load of an expert over the mean, in the worst block; 1 is even, None without experts.
        said: what each rank had to tell the others, by rank.
    """

    loss: float
    grad_norm: float
    targets: int
    step_s: float
    mem_bytes: tuple[int, ...]
    loss_scale: float = 1.0
    skipped: bool = False
    expert_load: float | None = None
    said: tuple[int, ...] = ()


def silence() -> int:
    """Nothing to tell the others."""
    return 0


class Totals(NamedTuple):
    """Numbers of a step over all ranks; `loss` is a sum, `norm` is scaled as the gradients are."""

    loss: Tensor
    norm: Tensor
    mem_bytes: tuple[int, ...]
    expert_load: float | None
    said: tuple[int, ...]


class TrainStep:
    """Gradients of all micro-batches, one update. The same for one rank and for thousands.

    Args:
        make_optimizer: builds the optimizer from the tensors that it shall move, by global name, gradients beside them.
        clip: largest global gradient norm; 0 turns clipping off.
    """

    def __init__(
        self,
        model: ParallelModel,
        *,
        make_optimizer: Callable[[Mapping[str, Tensor]], Optimizer],
        clip: float,
        on_action: ActionCallback | None = None,
    ) -> None:
        self.model, self.clip = model, clip
        self.grads = make_gradient_reducer(model)
        self.optimizer = make_optimizer(self.grads.sharded_params)
        self.loss_scale = LossScale.of(model.plan)
        self.player = Player(model, before_last_backward=self.grads.set_requires_gradient_sync, on_action=on_action)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, each counted once; every rank must ask at the same time."""
        comm = self.model.comm
        mine = sum(
            piece.shard.size for name, piece in self.model.shards.items() if grad_norm.is_first_holder(self.model, name)
        )
        count = torch.tensor(mine, dtype=torch.int64, device=comm.device)
        return int(comm.all_reduce(count, tuple(name for name, _ in comm.mesh.axes)).item())

    def __call__(self, batches: Sequence[Batch], *, lr: float, says: Callable[[], int] = silence) -> StepReport:
        """Train on this rank's micro-batches of one step.

        `says` is asked once gradients are there: its number travels to all ranks with those that every step gathers.
        """
        start, scale = time.perf_counter(), self.loss_scale.value
        targets = self._count_targets(batches)
        self.grads.zero_grad()
        played = self.player.play(batches, scale / targets)
        self.grads.finish()
        grad_norm.sum_tied_gradients(self.model, self.grads)
        loads = sum_loads(played.loads, self.model.comm)
        totals = self._gather_totals(played.loss, imbalance(loads), says())
        norm = totals.norm / scale
        is_finite = math.isfinite(norm.item())
        skipped = self.loss_scale.skips(is_finite=is_finite)
        if not skipped:
            grad_norm.clip(self.grads, norm, most=self.clip, scale=scale)
            self._update(lr)
            rebalance_routers(self.model.blocks, loads)
        self.loss_scale = self.loss_scale.after(is_finite=is_finite)
        return StepReport(
            loss=(totals.loss / targets).item(),
            grad_norm=norm.item(),
            targets=int(targets.item()),
            step_s=time.perf_counter() - start,
            mem_bytes=totals.mem_bytes,
            loss_scale=scale,
            skipped=skipped,
            expert_load=totals.expert_load,
            said=totals.said,
        )

    def _update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.grads.after_optimizer_step()

    def _count_targets(self, batches: Sequence[Batch]) -> Tensor:
        """Target tokens of the whole step, float64 scalar; at least 1, so that a step without targets has loss 0."""
        comm = self.model.comm
        counts = torch.stack([batch.num_targets() for batch in batches]).sum().double()
        return comm.all_reduce(counts, data_axes(comm.mesh)).clamp(min=1)

    def _gather_totals(self, loss: Tensor, expert_load: float, word: int) -> Totals:
        """What is known of the step over all ranks: every rank sums the same numbers in the same order."""
        comm, mesh = self.model.comm, self.model.comm.mesh
        loss_once = loss if comm.index("tp") == 0 else torch.zeros_like(loss)
        facts = torch.tensor((memory_bytes(comm.device), expert_load, word), dtype=torch.float64, device=comm.device)
        mine = torch.stack((loss_once, grad_norm.squared_norm(self.model, self.grads), *facts.unbind())).unsqueeze(0)
        everyone = comm.all_gather(mine, tuple(name for name, _ in mesh.axes), dim=0)
        losses, squares, mems, expert_loads, words = everyone.unbind(1)
        stage_of_rank = [mesh.coord(rank).get("pp", 0) for rank in range(mesh.size)]
        per_stage = [0] * mesh.degree("pp")
        for stage, value in zip(stage_of_rank, mems.tolist(), strict=True):
            per_stage[stage] = max(per_stage[stage], int(value))
        said = tuple(int(word) for word in words.tolist())
        return Totals(losses.sum(), squares.sum().sqrt(), tuple(per_stage), expert_loads.max().item() or None, said)


def memory_bytes(device: torch.device) -> int:
    """Memory of this rank: peak allocated bytes on CUDA, resident set of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return int(psutil.Process().memory_info().rss)
