"""One training step: forward and backward of all micro-batches, gradient reduction, clipping, optimizer update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from weft.checkpoint import restore
from weft.checkpoint.state import TrainState
from weft.core.axes import data_axes, local_update_axis
from weft.core.dimension import local_update_axes, plain_data_axes, replicated_axes
from weft.errors import CheckpointError, Fault, NonFiniteError, PlanError
from weft.models.common.batch import Batch
from weft.models.common.preference import preference_loss_of
from weft.parallel.local_updates.outer_step import LocalUpdates, OuterReport, OuterSettings
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.model.recorded_buffers import apply_updates
from weft.parallel.pipeline.player import Player, PlayResult
from weft.parallel.zero import grad_norm
from weft.parallel.zero.fixed_order import Leaf, exact_sum
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.grouping import make_gradient_reducer
from weft.parallel.zero.matrix_shards import param_entries
from weft.run.rank_status import Phase
from weft.schedule.actions import Act
from weft.train.expert_load import imbalance, rebalance_routers, sum_loads
from weft.train.kl_estimate import KlEstimate
from weft.train.loss_scale import LossScale
from weft.train.nonfinite import NonFiniteValue, locate
from weft.train.optim import NamedOptimizer, StepOptimizer
from weft.train.rewards import Rewards, rank_sums, reward_sums_of
from weft.train.step_phases import action_reporter, ignore_phase
from weft.train.step_stats import (
    LEAST_TARGETS,
    PendingTotals,
    RankStats,
    StepTotals,
    take_peak_bytes,
    total_stats,
)


@dataclass(frozen=True)
class StepReport:
    """Result of one optimizer step, the same on every rank.

    Attributes:
        loss: mean over the target tokens of the whole step, nats; with local updates the mean of
            the sites' losses.
        grad_norm: global norm before clipping, without the loss scale; with local updates the mean
            of the sites' norms.
        targets: target tokens that counted, over all ranks.
        step_s: seconds from the first action to the end of the update, on this rank.
        mem_bytes: per pipeline rank, the largest memory of its ranks (resident set on CPU, peak
            allocated on CUDA since the step before).
        loss_scale: factor of the loss under which the gradients were computed; 1 except for
            float16.
        skipped: whether the update was skipped, because gradients overflowed at that scale or a
            value was not finite.
        nonfinite: the first non-finite value, if the update was skipped for that.
        expert_load: largest over mean load of an expert, in the worst block; 1 is balanced, None
            without experts.
        status: status flags that any rank has set.
        outer: what the step had to do with other sites; None without local updates.
        rewards: of its answers; None: the loss is not of answers.
    """

    loss: float
    grad_norm: float
    targets: int
    step_s: float
    mem_bytes: tuple[int, ...]
    loss_scale: float = 1.0
    skipped: bool = False
    nonfinite: NonFiniteValue | None = None
    expert_load: float | None = None
    status: int = 0
    outer: OuterReport | None = None
    rewards: Rewards | None = None


@dataclass(frozen=True)
class ComputedStep:
    """A step before its update.

    Attributes:
        start_s: time.perf_counter() of its start.
        scale: factor of the loss.
        played: loss and loads of this rank.
        loads: block name -> tokens of each expert, over all ranks.
    """

    start_s: float
    scale: float
    played: PlayResult
    loads: Mapping[str, Tensor]
    totals: PendingTotals


def no_status() -> int:
    """No status flags."""
    return 0


def _local_updates(
    model: ParallelModel, grads: GradientReducer, settings: OuterSettings | None
) -> LocalUpdates | None:
    """The outer optimizer, of a mesh with an axis of local updates."""
    axis = local_update_axis(model.comm.mesh)
    if axis is None:
        return None
    if settings is None:
        what = f"replicas along {axis} train apart, and no outer optimizer joins them"
        raise PlanError(
            Fault("mesh", what, got=str(model.comm.mesh), need="settings of the outer step")
        )
    return LocalUpdates(model, grads, settings)


def nonfinite_text(loss: float, norm: float, where: NonFiniteValue) -> str:
    """The loss, the norm, and where the first non-finite value is."""
    return f"the loss is {loss:g} and the gradient norm is {norm:g}; {where}"


class TrainStep:
    """The training step of one rank; the same code for one rank and for thousands.

    Args:
        make_optimizer: builds the optimizer of the tensors to update, by global name; their
            gradients are in `.grad`.
        clip: largest global gradient norm; 0: no clipping.
        fixed_order: whether loss, norm and gradients have the same bits for every number of data
            ranks.
        outer: settings of the outer optimizer; for a mesh with an axis of local updates.
        has_rewards: whether the loss is of answers that have rewards; see `weft.train.rewards`.
        estimates_kl: whether it needs z0, too; see `weft.train.kl_estimate`.

    Attributes:
        grads: the gradients, and the tensors that the optimizer updates.
        local_updates: the outer optimizer; None without local updates.
        kl: estimates z0 before each step; None where the loss needs none.

    Raises:
        PlanError: the mesh has an axis of local updates, and `outer` is None.
    """

    def __init__(
        self,
        model: ParallelModel,
        *,
        make_optimizer: Callable[[Mapping[str, Tensor]], StepOptimizer],
        clip: float,
        fixed_order: bool = False,
        outer: OuterSettings | None = None,
        has_rewards: bool = False,
        estimates_kl: bool = False,
    ) -> None:
        self.model = model
        self.clip = clip
        self.fixed_order = fixed_order
        self.has_rewards = has_rewards
        self.grads = make_gradient_reducer(model, fixed_order=fixed_order)
        self.optimizer = make_optimizer(self.grads.sharded_params)
        if isinstance(self.optimizer, NamedOptimizer):
            entries = param_entries(model, self.grads)
            owners = {name: model.shards[name].owner for name in entries}
            self.optimizer.attach(entries, model.comm, owners=owners, fixed_order=fixed_order)
        self.local_updates = _local_updates(model, self.grads, outer)
        self.loss_scale = LossScale.of(model.plan)
        self.kl = KlEstimate(model, fixed_order=fixed_order) if estimates_kl else None
        self.player = Player(model, before_last_backward=self.grads.set_requires_gradient_sync)

    @property
    def num_params(self) -> int:
        """Parameters of the whole model, each counted once; every rank must call it."""
        comm = self.model.comm
        num_local = 0
        for name, param in self.model.shards.items():
            if grad_norm.is_first_holder(self.model, name):
                num_local += param.shard.size
        count = torch.tensor([num_local], dtype=torch.int64, device=comm.device)
        num_replicas = comm.degree(local_update_axes())
        # The replica of each site has counted all of its parameters.
        return int(comm.sum_world(count).item()) // num_replicas

    def state(self) -> TrainState:
        """What a checkpoint stores of this step, besides the loss scale.

        Raises:
            CheckpointError: the optimizer's state has no parameter names, as in torch's own.
        """
        optimizer = self.optimizer
        if not isinstance(optimizer, NamedOptimizer):
            what = "an optimizer whose state has no parameter names cannot be saved"
            got = type(optimizer).__qualname__
            need = "a weft.train.optim.NamedOptimizer"
            raise CheckpointError(Fault("optim", what, got=got, need=need))
        return TrainState(
            model=self.model,
            grads=self.grads,
            optimizer_state=optimizer.state,
            optimizer_keys=optimizer.state_keys(),
            state_blocks=optimizer.state_blocks(),
            local_updates=self.local_updates,
        )

    def set_position(self, num_done: int) -> None:
        """Say how many steps are done, which decides when the next outer step is due."""
        if self.local_updates is not None:
            self.local_updates.num_steps = num_done

    def finish(self) -> None:
        """Wait for an exchange between sites that is under way; every rank must call it."""
        if self.local_updates is not None:
            self.local_updates.wait()

    def restore_parameters(self, checkpoint: restore.OpenCheckpoint) -> None:
        """Load parameters alone; optimizer state and loss scale become those before the first step.
        Every rank must call it.

        Raises:
            CheckpointError: see `weft.checkpoint.restore.restore_parameters`.
        """
        self._reset_optimizer()
        restore.restore_parameters(self.state(), checkpoint)

    def restore(
        self, checkpoint: restore.OpenCheckpoint, *, may_reset_optimizer: bool = False
    ) -> None:
        """Load parameters, optimizer state and loss scale; every rank must call it.

        Args:
            may_reset_optimizer: begin with fresh optimizer state where the checkpoint has that of
                another optimizer.

        Raises:
            CheckpointError: see `weft.checkpoint.restore.restore`.
        """
        self.grads.before_change()
        state = self.state()
        if may_reset_optimizer and not restore.has_optimizer_state(state, checkpoint.manifest):
            self.restore_parameters(checkpoint)
            return
        restore.restore(state, checkpoint)
        stored = checkpoint.manifest.facts.loss_scale
        if stored and self.loss_scale.is_dynamic:
            self.loss_scale = LossScale(
                stored["value"], is_dynamic=True, good_steps=stored["good_steps"]
            )

    def _reset_optimizer(self) -> None:
        self.grads.before_change()
        if self.local_updates is not None:
            self.local_updates.reset()
        self.loss_scale = LossScale.of(self.model.plan)
        for state in self.state().optimizer_state.values():
            for tensor in state.values():
                tensor.zero_()

    def __call__(
        self,
        batches: Sequence[Batch],
        *,
        lr: float,
        status: Callable[[], int] = no_status,
        on_phase: Callable[[Phase], None] | None = None,
        on_nonfinite: Literal["raise", "skip"] = "raise",
        on_gradients: Callable[[ComputedStep, StepTotals], None] | None = None,
    ) -> StepReport:
        """Train on this rank's micro-batches of one step.

        Args:
            status: called once the gradients are computed; every rank receives the result of every
                rank.
            on_phase: called with each phase as it begins: "forward" and "backward" with every
                action, "reduce", "update".
            on_nonfinite: if the loss or the gradient norm is not finite, raise, or skip the update
                and change nothing; float16 gradients that overflow under a loss scale always skip.
            on_gradients: called when the gradients are reduced, before they are clipped and used.

        Raises:
            NonFiniteError: on all ranks, before the update, if the loss or the gradient norm is not
                finite.
            WeftError: float16 gradients overflow at the smallest loss scale.
        """
        report_phase = on_phase or ignore_phase
        computed = self.compute(batches, status=status, on_phase=on_phase)
        scale = computed.scale
        totals = computed.totals.read()
        if on_gradients is not None:
            on_gradients(computed, totals)
        loss = totals.loss
        norm = totals.grad_norm / scale
        nonfinite = self._find_nonfinite(loss, norm, batches, own_loss=computed.played.loss)
        if nonfinite is not None and on_nonfinite == "raise":
            raise NonFiniteError(nonfinite_text(loss, norm, nonfinite))
        is_finite = math.isfinite(norm)
        report_phase("update")
        # Every rank decides alike: the totals are sums over all ranks. A rank that skipped alone would leave the others
        # in the collectives of the update.
        is_overflow = self.loss_scale.skips(is_finite=is_finite)
        skipped = is_overflow or nonfinite is not None
        if not skipped:
            grad_norm.clip(self.grads, totals.grad_norm_tensor / scale, most=self.clip, scale=scale)
            self.update(lr)
            # Changes of routers and buffers wait until here, for a step that is skipped must leave them as they were;
            # nothing has read them since the forward.
            rebalance_routers(self.model.blocks, computed.loads)
            self._update_buffers()
        outer = self._join_sites(report_phase)
        # Last, for the parameters that are gathered must be those of the outer step, too.
        if not skipped or (outer is not None and outer.is_applied):
            self.grads.after_optimizer_step()
        if nonfinite is None:
            self.loss_scale = self.loss_scale.after(is_finite=is_finite)
        return StepReport(
            loss=loss,
            grad_norm=norm,
            targets=totals.targets,
            step_s=time.perf_counter() - computed.start_s,
            mem_bytes=totals.mem_bytes,
            loss_scale=scale,
            skipped=skipped,
            nonfinite=nonfinite,
            expert_load=totals.expert_load,
            status=totals.status,
            outer=outer,
            rewards=totals.rewards,
        )

    def compute(
        self,
        batches: Sequence[Batch],
        *,
        status: Callable[[], int] = no_status,
        on_phase: Callable[[Phase], None] | None = None,
    ) -> ComputedStep:
        """Compute loss, gradients and totals of one step, and wait for none of them; the arguments
        are those of a whole step.
        """
        start_s = time.perf_counter()
        report_phase = on_phase or ignore_phase
        report_phase("forward")
        if self.local_updates is not None:
            self.grads.before_change()
            self.local_updates.before_inner_step()
        scale = self.loss_scale.value
        # Targets are counted before the first forward: the seed of every backward divides by those of all ranks, so that
        # gradients need no scaling afterwards.
        targets = self._count_targets(batches)
        self.grads.zero_grad()
        self.model.buffer_records.take()  # of a step that was skipped, or whose update failed
        if self.kl is not None:
            self.kl.update(batches)
        loss = preference_loss_of(self.model.blocks) if self.has_rewards else None
        with reward_sums_of(loss, fixed_order=self.fixed_order) as rewards:
            played = self.player.play(
                batches, scale / targets, before_action=self._before_action(on_phase)
            )
        report_phase("reduce")
        self.grads.finish()
        # Copies of tied weights on two stages are added once each is reduced over its data ranks.
        grad_norm.sum_tied_gradients(self.model, self.grads)
        loads = sum_loads(played.loads, self.model.comm)
        totals = self._total_stats(
            played,
            targets,
            rewards=rewards,
            expert_load=imbalance(loads, self.model.comm.device),
            status=status(),
        )
        return ComputedStep(start_s, scale, played, loads, totals)

    def _update_buffers(self) -> None:
        """Update buffers by the forwards of this step."""
        model = self.model
        num_runs = 1
        if self.fixed_order and model.plan.zero < 2:
            num_runs = model.comm.degree(plain_data_axes())
        apply_updates(
            model.buffer_records,
            model.comm,
            microbatches=model.plan.table.microbatches,
            num_runs=num_runs,
            num_played=self.player.table.microbatches,
        )

    def _join_sites(self, on_phase: Callable[[Phase], None]) -> OuterReport | None:
        """Exchange outer gradients with other sites where that is due."""
        if self.local_updates is None:
            return None
        self.grads.before_change()
        return self.local_updates.after_inner_step(partial(on_phase, "exchange"))

    def _before_action(
        self, on_phase: Callable[[Phase], None] | None
    ) -> Callable[[Act], None] | None:
        report = action_reporter(on_phase)
        if not self.fixed_order:
            return report

        def before(act: Act) -> None:
            self.grads.begin_leaf(Leaf(act.stage, act.mb))
            if report is not None:
                report(act)

        return before

    def _find_nonfinite(
        self, loss: float, norm: float, batches: Sequence[Batch], *, own_loss: Tensor
    ) -> NonFiniteValue | None:
        """Where the step is not finite: its loss, or its gradient norm without a dynamic loss
        scale; the same on all ranks.
        """
        is_overflow_of_scale = math.isfinite(loss) and self.loss_scale.is_dynamic
        if is_overflow_of_scale or (math.isfinite(loss) and math.isfinite(norm)):
            return None
        return locate(self.model, self.grads, batches, loss=own_loss)

    def update(self, lr: float, *, skip: Tensor | None = None) -> None:
        """Update the parameters.

        Args:
            skip: scalar on the device; 1: nothing is to change. For `NamedOptimizer` with
                `skips_on_device`.
        """
        self.grads.before_change()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if skip is None:
            self.optimizer.step()
            return
        assert isinstance(self.optimizer, NamedOptimizer), "it skips on the device"
        self.optimizer.step(skip=skip)

    def _count_targets(self, batches: Sequence[Batch]) -> Tensor:
        """Target tokens of the whole step, with local updates of this site, float64 scalar; at
        least `LEAST_TARGETS`.
        """
        comm = self.model.comm
        counts = torch.stack([batch.num_targets() for batch in batches])
        local = counts.sum().double()
        total = comm.all_reduce(local, data_axes(comm.mesh))
        return total.clamp(min=LEAST_TARGETS)

    def _total_stats(
        self,
        played: PlayResult,
        targets: Tensor,
        *,
        rewards: Sequence[Tensor],
        expert_load: Tensor,
        status: int,
    ) -> PendingTotals:
        comm = self.model.comm
        is_first_copy = comm.index(replicated_axes()) == 0  # the others hold copies of the loss
        if is_first_copy:
            loss = played.loss
        else:
            loss = torch.zeros_like(played.loss)
        if self.fixed_order:
            losses = played.losses if is_first_copy else ()
            loss = self._on_first_rank(exact_sum(comm, losses))
            norm = self._on_first_rank(grad_norm.exact_squared_norm(self.model, self.grads))
        else:
            norm = grad_norm.squared_norm(self.model, self.grads)
        local = RankStats(
            loss=loss,
            grad_sq_norm=norm,
            mem_bytes=take_peak_bytes(comm.device),
            expert_load=expert_load,
            status=status,
            rewards=self._reward_sums(rewards) if self.has_rewards else None,
        )
        return total_stats(comm, local, targets)

    def _reward_sums(self, rewards: Sequence[Tensor]) -> Tensor:
        """This rank's part of the sums of rewards, then of z0."""
        sums = rank_sums(self.model.comm, rewards, fixed_order=self.fixed_order)
        if self.kl is None or self.kl.mean is None:
            return sums
        return torch.cat((sums, self._on_first_rank(self.kl.mean).unsqueeze(0)))

    def _on_first_rank(self, total: Tensor) -> Tensor:
        """A sum over all ranks as a number that is added over ranks."""
        if self.model.comm.rank == 0:
            return total
        return torch.zeros_like(total)
