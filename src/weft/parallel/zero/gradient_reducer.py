"""Gradients of one rank: accumulated over micro-batches, reduced over ranks during the backward, sharded by ZeRO stage.

A parameter is replicated on the ranks along the axes over which its gradient is summed; exactly
there it is sharded. So data, context and expert ranks, and norms under sequence parallelism, all
follow the one gradient rule.

    zero    held by a rank between steps                       collectives, per group
    0       parameters, gradients, optimizer states            all-reduce a step
    1       parameters, gradients; its shard of the states     reduce-scatter a step, all-gather a step
    2       parameters; its shard of gradients and states      reduce-scatter a micro-batch, all-gather a step
    3       its shards                                         2 all-gathers and a reduce-scatter a micro-batch

Source: Li et al. 2020 (DDP); Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).

Note [Reduction order]
    Which parameter lies in which group, and the order in which groups are reduced, is fixed when
    the groups are made: backwards through the model. It never depends on the order in which
    gradients arrive. So the sums of a resumed run are bit for bit those of the uninterrupted one,
    and every rank starts its collectives in the same order, whichever parameters its own samples
    use. A group waits for those before it; what a backward leaves is reduced at its end where every
    backward is reduced, else by `finish`.

Note [Hooks hold no reducer]
    torch keeps a hook on accumulated gradients where Python's garbage collector cannot see it. A
    hook that held the reducer would keep the parameters, which hold the hook, for ever: each model
    of a process would stay in memory. So hooks find the reducer by a weak reference.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.parallel.autograd.backward_end import after_this_backward
from weft.parallel.zero.fixed_order import Leaf
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.reductions_under_way import ReductionsUnderWay

if TYPE_CHECKING:
    from weft.parallel.zero.quantized_group import QuantizedGroup  # wrappers of scripts need none


class GradientReducer:
    """All trained parameters of one rank in groups, and what the optimizer updates of them.

    Args:
        groups: in the order in which the forward first uses them; reductions start in reverse
            order.
        reduces_every_backward: whether gradients are reduced in each backward; else only in those
            of stages for which `set_requires_gradient_sync` was called since the last `finish`.
        split_stages: stages whose backward comes in two parts, input gradients and weight
            gradients.
        shared: parameters that several stages of this rank use: the backward of each yields
            gradients for them.
        ungrouped: parameters that are in no group, such as the biases of routers; for
            `full_parameters`.
        quantized: matrices that are held in 4 bits -> their group, one of `groups`.

    Attributes:
        sharded_params: what the optimizer updates, by global name: this rank's entries,
            one-dimensional, `.grad` set.
        frozen_shards: this rank's entries of frozen parameters that no rank holds unsharded between
            steps.
        shard_axes: mesh axes over which the entries of each parameter are sharded.
        shard_ranges: which entries of this rank's part of a parameter, counted row by row, lie in
            its tensor: (start, stop).
        trained_groups: those of `groups` with gradients.
        is_reduced_once: whether a group keeps its unsharded gradient, to be reduced once a step.
        arrived: parameters that have had a gradient since the last `finish`.
        has_repeated: whether a backward has yielded several gradients for a parameter.
        norm_weights: for the names of some gradients, 1 for each that counts in the norm, else 0;
            kept on the device from step to step.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        comm: Comm,
        *,
        reduces_every_backward: bool = False,
        split_stages: frozenset[int] = frozenset(),
        shared: frozenset[str] = frozenset(),
        ungrouped: Mapping[str, nn.Parameter] | None = None,
        quantized: Mapping[str, QuantizedGroup] | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.trained_groups: tuple[ParamGroup, ...] = ()
        self.comm = comm
        self.reduces_every_backward = reduces_every_backward
        self.split_stages = split_stages
        self.shared = shared
        self.ungrouped = dict(ungrouped or {})
        self.sharded_params: dict[str, Tensor] = {}
        self.frozen_shards: dict[str, Tensor] = {}
        self.quantized = dict(quantized or {})
        self.shard_axes: dict[str, tuple[str, ...]] = {}
        self.shard_ranges: dict[str, tuple[int, int]] = {}
        self.arrived: set[str] = set()
        self.has_repeated = False
        self._arrived_in_backward: set[str] = set()
        self.norm_weights: dict[tuple[str, ...], Tensor] = {}
        self._before_change: list[Callable[[], None]] = []
        self._after_backward: Callable[[], Callable[[], None] | None] | None = None
        self._stages_to_sync: set[int] = set()
        self._touched: dict[int, ParamGroup] = {}
        self._complete: set[int] = set()
        self._waiting: dict[int, deque[ParamGroup]] = {}
        self._block_positions: dict[int, int] = {}
        self._under_way = ReductionsUnderWay(comm)
        self.is_reduced_once = False
        self._hooks: list[RemovableHandle] = []
        self._stages: list[int] = []
        for group in self.groups:
            self._register_shards(group)
        self.follow_requires_grad()

    def follow_requires_grad(self) -> None:
        """Reduce the gradients of the parameters that have `requires_grad` now."""
        self.remove_hooks()
        self.trained_groups = tuple(group for group in self.groups if group.is_trained)
        for place, group in enumerate(self.trained_groups):
            group.expect_gradients()
            self._register_hooks(place)
        self.is_reduced_once = any(
            group.policy.keeps_unsharded_grad for group in self.trained_groups
        )
        self._stages = sorted({group.stage for group in self.trained_groups})
        self._requeue(self._stages)

    def remove_hooks(self) -> None:
        """Leave the parameters: their gradients are reduced no longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _register_shards(self, group: ParamGroup) -> None:
        policy = group.policy
        held: dict[str, Tensor] = {}
        if group in self.quantized.values():
            return
        if not group.is_trained:
            if group.reshards and group.sharded_param is not None:
                held = group.layout.shard_views(group.sharded_param, group.index)
                self.frozen_shards.update(held)
        elif policy.keeps_sharded_grad:
            held = group.optimizer_params()
            self.sharded_params.update(held)
        for span in group.layout.spans:
            name = span.name
            if name not in held:
                continue
            entries = group.layout.overlap(span, group.index).in_param
            self.shard_axes[name] = group.axes if policy.zero else ()
            self.shard_ranges[name] = (entries.start, entries.stop)

    def _register_hooks(self, place: int) -> None:
        """Hooks of the parameters of one of `trained_groups`; see Note [Hooks hold no reducer]."""
        weak_self = weakref.ref(self)

        def hook_of(name: str) -> Callable[[Tensor], None]:
            def on_gradient(param: Tensor) -> None:
                reducer = weak_self()
                if reducer is None:
                    raise RuntimeError(
                        f"{name} has a gradient, and its wrapper was deleted: keep it"
                    )
                # By its place: a hook that held the group would hold the parameters.
                group = reducer.trained_groups[place]
                if not torch.is_grad_enabled():
                    reducer._on_gradient(group, name, param)
                    return
                with torch.no_grad():  # the backward creates a graph, of which `.grad` is no part
                    reducer._on_gradient(group, name, param)

            return on_gradient

        for name, param in self.trained_groups[place].params.items():
            if param.requires_grad:
                hook = param.register_post_accumulate_grad_hook(hook_of(name))
                self._hooks.append(hook)

    @property
    def has_unfinished_reduction(self) -> bool:
        """Whether a reduction has started since the last `finish`."""
        return any(group.is_reduced for group in self.groups)

    @property
    def has_unfinished_gradients(self) -> bool:
        """Whether gradients have arrived, or a reduction has started, since the last `finish`."""
        return bool(self.arrived) or self.has_unfinished_reduction

    def zero_grad(self) -> None:
        """Set every gradient to 0, before the first backward of a step."""
        for group in self.groups:
            group.zero_grad()

    def set_requires_gradient_sync(self, stage: int, requires_gradient_sync: bool = True) -> None:
        """Whether the next backward of `stage` reduces each group as soon as it is complete: the
        last one of a step does.
        """
        if requires_gradient_sync:
            self._stages_to_sync.add(stage)
        else:
            self._stages_to_sync.discard(stage)

    def call_after_backward(self, act: Callable[[], Callable[[], None] | None]) -> None:
        """Have the function that the weak reference `act` refers to called after each backward."""
        self._after_backward = act

    def begin_backward(self) -> None:
        """A backward of a wrapped module begins, in which others may run."""
        self._arrived_in_backward.clear()

    def begin_leaf(self, leaf: Leaf) -> None:
        """Say whose backward runs next, where gradients are added in a fixed order."""
        for group in self.trained_groups:
            group.leaf = leaf

    # during a backward

    def _reduces_now(self, stage: int) -> bool:
        return self.reduces_every_backward or stage in self._stages_to_sync

    def _on_gradient(self, group: ParamGroup, name: str, param: Tensor) -> None:
        """Hook: autograd has accumulated the gradient that one backward yields for a parameter."""
        if not self._touched:
            # The first gradient of this backward: its end is asked for once.
            after_this_backward(self._on_backward_end)
        key = id(group)
        self._touched[key] = group
        if param.grad is not None:  # else autograd has found that it is zero
            self.arrived.add(name)
        self.has_repeated |= name in self._arrived_in_backward
        self._arrived_in_backward.add(name)
        is_complete = group.accumulate_grad(name, param)
        if not is_complete:
            return
        # All of this backward are there; from here on those of the next one are missing.
        group.expect_gradients()
        # A complete group is reduced when those before it are: the order in which autograd finishes groups may differ
        # between ranks, that of collectives may not.
        if self._reduces_now(group.stage) and not group.reduces_each_leaf:
            self._complete.add(key)
            self._reduce_in_order(group.stage)
        group.reshard_after_backwards()

    def _reduce_in_order(self, stage: int) -> None:
        """Start the reductions of complete groups, up to the first that is not. See Note [Reduction
        order].
        """
        waiting = self._waiting[stage]
        while waiting:
            group = waiting[0]
            key = id(group)
            if key not in self._complete:
                break
            waiting.popleft()
            self._complete.discard(key)
            self._under_way.start(group)
        # A split backward has no end at which groups are queued anew: its parts belong to several micro-batches.
        if not waiting and stage in self.split_stages:
            self._requeue([stage])

    def order_by_blocks(self, stage: int, positions: Mapping[int, int]) -> None:
        """Say that `reduce_behind` is called for a stage.

        Args:
            positions: id of a parameter -> which block of the stage is the first to use it.
        """
        self._under_way.ordered_stages.add(stage)
        for group in self.groups:
            if group.stage != stage:
                continue
            first_uses: list[int] = []
            for param in group.params.values():
                position = positions.get(id(param), 0)
                first_uses.append(position)
            self._block_positions[id(group)] = min(first_uses)

    def reduce_behind(self, stage: int, position: int) -> None:
        """Hook: the backward of the block at `position` begins, so those of the blocks behind it
        have ended. See Note [One order of gathers and reductions].
        """
        if not self._touched or not self._reduces_now(stage):
            return
        waiting = self._waiting[stage]
        while waiting:
            group = waiting[0]
            if self._block_positions.get(id(group), 0) <= position:
                break
            waiting.popleft()
            # Complete or not: on another rank the same group may be the other, and both reduce it here.
            self._complete.discard(id(group))
            group.expect_gradients()
            self._under_way.start(group)

    def _requeue(self, stages: Iterable[int]) -> None:
        """Expect a reduction of every group of these stages, last group first."""
        for stage in stages:
            waiting: deque[ParamGroup] = deque()
            for group in self.trained_groups:
                if group.stage == stage and not group.reduces_each_leaf:
                    waiting.appendleft(group)
            self._waiting[stage] = waiting

    def _on_backward_end(self) -> None:
        """Expect all gradients anew: those that have not come will not, except in the second part
        of a split backward.

        A group with a shared parameter starts anew too: what one stage yields is no part of what
        the other will yield.
        """
        ended_stages: set[int] = set()
        for group in self._touched.values():
            is_shared = not self.shared.isdisjoint(group.params)
            is_split = group.stage in self.split_stages
            if is_shared or not is_split:
                group.expect_gradients()
            if not is_shared and not is_split:
                ended_stages.add(group.stage)
            if group.reduces_each_leaf:
                self._under_way.start(group)
        self._touched.clear()
        for stage in sorted(ended_stages):
            self._reduce_incomplete(stage)
        act = None if self._after_backward is None else self._after_backward()
        if act is not None:
            act()

    def _reduce_incomplete(self, stage: int) -> None:
        """Reduce the groups that a backward left incomplete; those that are reduced once a step
        wait for `finish`.
        """
        if self.is_reduced_once or not self._reduces_now(stage):
            return
        for group in self._waiting[stage]:
            self._under_way.start(group)
        for group in self.trained_groups:
            if group.stage == stage:
                self._complete.discard(id(group))
        self._requeue([stage])

    # between the last backward and the next forward

    def start_remaining(self) -> None:
        """Start the reductions that no backward has started, in order."""
        # Last group first, as in a backward: on another rank the backward may have started some of
        # them, and collectives of one communicator have one order on all ranks.
        for group in reversed(self.trained_groups):
            has_unreduced = (
                group.unsharded_grad is not None and not group.policy.keeps_unsharded_grad
            )
            if not group.is_reduced or has_unreduced:
                self._under_way.start(group)

    def finish(self) -> None:
        """Wait until the sharded gradient of every group is the sum over all ranks and
        micro-batches.
        """
        self.start_remaining()
        # All sums start before the first is waited for: the waits then overlap with what is still on its way.
        self._under_way.start_replica_sums()
        for group in self.trained_groups:
            group.finish_step()
        # A block whose backward has not run on this rank is still unsharded.
        for group in self.groups:
            group.reshard()
        self._begin_step()

    def _begin_step(self) -> None:
        self._under_way.clear()
        self.arrived.clear()
        self._complete.clear()
        self._stages_to_sync.clear()
        self._requeue(self._stages)

    @property
    def is_interrupted(self) -> bool:
        """Outside of a backward: whether the last one has raised an error."""
        return bool(self._touched)

    def drop_interrupted(self) -> None:
        """Drop what a backward has yielded that has raised an error: the next one begins a step."""
        for group in self.trained_groups:
            group.drop_interrupted()
        self._touched.clear()
        self._begin_step()

    def used_on_any_rank(self, axis: Axis) -> frozenset[str]:
        """Parameters that have had a gradient since the last `finish`, on at least one rank of
        `axis`; before `finish`.

        Every rank calls it after `start_remaining`: one all-reduce of an integer for each
        parameter, as torch's DistributedDataParallel does to find unused parameters. A rank that
        has used all of them does not wait for the result.
        """
        names: list[str] = []
        for group in self.trained_groups:
            names.extend(group.params)
        if self.comm.degree(axis) == 1 or not names:
            return frozenset(self.arrived)
        num_ranks = torch.ones(len(names), dtype=torch.int32, device=self.comm.device)
        trained = {
            name
            for group in self.trained_groups
            for name, param in group.params.items()
            if param.requires_grad
        }
        has_used_all = self.arrived.issuperset(trained) and len(trained) == len(names)
        if not has_used_all:
            flags = torch.tensor([name in self.arrived for name in names])
            num_ranks.copy_(flags)
        # Called by ranks that have used all of them, too: others wait for their ones. These do not read
        # the result, so the host goes on.
        self.comm.all_reduce_(num_ranks, axis)
        if has_used_all:
            return frozenset(names)
        used: set[str] = set()
        for name, count in zip(names, num_ranks.tolist(), strict=True):
            if count > 0:
                used.add(name)
        return frozenset(used)

    def scale(self, factor: Tensor | float) -> None:
        """Multiply every reduced gradient by `factor` (a number, or a scalar tensor of high
        precision).
        """
        for group in self.groups:
            if group.sharded_grad is not None:
                group.sharded_grad.mul_(factor)

    def before_next_change(self, act: Callable[[], None]) -> None:
        """Have `act` called, once, before parameters or optimizer states change the next time: they
        are being copied.
        """
        self._before_change.append(act)

    def before_change(self) -> None:
        """Parameters or optimizer states are about to change."""
        for act in self._before_change:
            act()
        self._before_change.clear()

    def after_optimizer_step(self) -> None:
        """All-gather the updated values, two groups at a time; under ZeRO 3 the blocks' hooks
        gather them.
        """
        # The second is on its way while the first is copied out of its buffer; more at once would
        # need more buffers, and none would arrive sooner.
        held = [group for group in self.groups if not group.reshards]
        for group, following in itertools.zip_longest(held, held[1:]):
            group.start_all_gather()
            if following is not None:
                following.start_all_gather()
            group.unshard()

    def full_gradients(self) -> dict[str, Tensor]:
        """Reduced gradients by global name, unsharded; a collective over all ranks."""
        found: dict[str, Tensor] = {}
        for group in self.trained_groups:
            found.update(group.gather_grads())
        return found

    def full_parameters(self) -> dict[str, Tensor]:
        """Values by global name in the dtype that the optimizer updates, unsharded; a collective
        over all ranks.
        """
        found: dict[str, Tensor] = {}
        for name, param in self.ungrouped.items():
            values = param.detach()
            found[name] = values.clone()
        for group in self.groups:
            found.update(group.gather_params())
        return found
