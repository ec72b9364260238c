"""Owns ZeRO: optimizer states (1), gradients (2) and parameters (3) spread over the ranks that would hold copies of them.

A parameter is a copy on every rank along the axes over which its gradient is summed: exactly there it is spread. So data,
context and expert ranks, and norms under sequence parallelism, all follow the one gradient rule.

    stage   held by a rank all the time                      operations a step and unit
    1       parameters, gradients; its shard of the states   reduce-scatter, all-gather
    2       parameters; its shard of gradients, states       reduce-scatter a micro-batch, all-gather
    3       its shards alone                                 2 all-gathers and a reduce-scatter a micro-batch

Source: Rajbhandari et al. 2020 (ZeRO); Zhao et al. 2023 (FSDP).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.zero.param_group import ParamGroup, ShardingPolicy
from weft.parallel.zero.unshard_hooks import Needs, after_this_backward, gather_on_demand, units_of

__all__ = ["ShardingPolicy", "ShardedParams", "shard"]


class ShardedParams:
    """All trained parameters of one rank under a `ShardingPolicy`.

    Attributes:
        tensors: what the optimizer moves, by global name: this rank's entries, one-dimensional, `.grad` beside them.
        frozen: what nobody moves and no rank holds whole: this rank's entries, or none of them.
        spread: mesh axes over which the entries of each parameter are spread.
        ranges: which entries of this rank's piece of a parameter, counted row by row, lie in its tensor: from, up to.
        split_stages: stages whose backwards come in two parts, each with some of the gradients.
        shared: parameters that several stages of this rank use: backwards of each of them bring gradients.
        defers: while it is on, gradients are reduced only by backwards that were armed, whatever the stage.
    """

    def __init__(
        self,
        units: Sequence[ParamGroup],
        comm: Comm,
        policy: ShardingPolicy,
        *,
        split_stages: frozenset[int] = frozenset(),
        shared: frozenset[str] = frozenset(),
    ) -> None:
        self.units, self.comm, self.policy = tuple(units), comm, policy
        self.split_stages, self.shared = split_stages, shared
        self.sharded_params: dict[str, Tensor] = {}
        self.frozen_shards: dict[str, Tensor] = {}
        self.shard_axes: dict[str, tuple[str, ...]] = {}
        self.shard_ranges: dict[str, tuple[int, int]] = {}
        self.defers = policy.zero <= 1
        self._armed: set[int] = set()
        self._touched: list[ParamGroup] = []
        for unit in self.units:
            self._register(unit)

    def _register(self, unit: ParamGroup) -> None:
        gradients = unit.layout.shard_views(unit.grad, unit.index) if unit.grad is not None else {}
        held = {slot.name: unit.layout.cut(slot, unit.index)[0] for slot in unit.layout.slots}
        for name, entries in unit.layout.shard_views(unit.shard, unit.index).items():
            is_moved, is_frozen = name in gradients and entries.numel() > 0, unit.is_on_demand and not unit.is_trained
            if is_moved:
                entries.grad = gradients[name]
                self.sharded_params[name] = entries
            if is_frozen:
                self.frozen_shards[name] = entries
            if is_moved or is_frozen:
                self.shard_axes[name] = unit.axes if unit.policy.zero else ()
                self.shard_ranges[name] = (held[name].start, held[name].stop)
        for name, param in unit.params.items() if unit.is_trained else ():
            param.register_post_accumulate_grad_hook(lambda param, name=name: self._arrived(unit, name, param))

    @property
    def trained(self) -> tuple[ParamGroup, ...]:
        """Units with gradients."""
        return tuple(unit for unit in self.units if unit.is_trained)

    def zero_grad(self) -> None:
        """Make every gradient 0, before the first backward of a step."""
        for unit in self.units:
            unit.zero_gradients()

    def set_requires_gradient_sync(self, stage: int) -> None:
        """The next backward of `stage` is its last in this step."""
        self._armed.add(stage)

    def _arrived(self, unit: ParamGroup, name: str, param: Tensor) -> None:
        """A parameter's gradient of one backward is there; the unit's last one sets it off."""
        if not self._touched:
            after_this_backward(self._backward_is_over)
        self._touched.append(unit)
        if unit.take_gradient(name, param):
            unit.missing = set(unit.params)
            if not self.defers or unit.stage in self._armed:
                unit.start_reduce()
            unit.release()

    def _backward_is_over(self) -> None:
        """A gradient that has not come will not, but with the second part: the next backward counts anew.

        So it does for what several stages share: what the one stage brought is no part of what the other will bring.
        """
        for unit in self._touched:
            if unit.stage not in self.split_stages or not self.shared.isdisjoint(unit.params):
                unit.missing = set(unit.params)
        self._touched.clear()

    def finish(self) -> None:
        """Wait until `grad` of every unit is the sum over all ranks and micro-batches."""
        for unit in self.trained:
            if not unit.is_reduced or (unit.full is not None and not self.policy.keeps_full):
                unit.start_reduce()
        for unit in self.trained:
            unit.settle()
            unit.missing, unit.is_reduced = set(unit.params), False
        for unit in self.units:
            unit.release()
        self._armed.clear()

    def scale(self, factor: Tensor | float) -> None:
        """Multiply every gradient by `factor`."""
        for unit in self.units:
            if unit.grad is not None:
                unit.grad.mul_(factor)

    def after_optimizer_step(self) -> None:
        """Bring the moved values to the blocks, the next unit's while one is taken in; on demand the blocks ask when they run."""
        held = [unit for unit in self.units if not unit.is_on_demand]
        for unit, following in zip(held, (*held[1:], None), strict=False):
            unit.start_refresh()
            if following is not None:
                following.start_refresh()
            unit.finish_gather()

    def full_gradients(self) -> dict[str, Tensor]:
        """Finished gradients by global name, this rank's whole pieces; every rank must ask at the same time."""
        return self._whole(self.trained, lambda unit: unit.grad)

    def full_parameters(self) -> dict[str, Tensor]:
        """Values by global name in `params`, this rank's whole pieces; every rank must ask at the same time."""
        return self._whole(self.units, lambda unit: unit.shard)

    def _whole(self, units: Sequence[ParamGroup], shard_of: Callable[[ParamGroup], Tensor | None]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for unit in units:
            shard = shard_of(unit)
            assert shard is not None, "only units with such a shard were asked for"
            flat = self.comm.all_gather(shard, unit.axes) if unit.is_spread else shard
            found |= {name: view.clone() for name, view in unit.layout.views(flat).items()}
        return found


def shard(model: ParallelModel, policy: ShardingPolicy) -> ShardedParams:
    """The parameters of a model, spread as `policy` says: those that are trained, and those that adapters have frozen.

    What is frozen has no gradients and no states to spread: it is spread from ZeRO 3 on, and held in the type of compute.
    Others (the biases of routers) stay as they are.

    A model whose parameters have no values yet gets them unit by unit, so that on demand no rank ever holds all of its part.
    """
    split = frozenset(stage for stage, _ in model.plan.table.splits)
    units, shared = tuple(_units(model, policy)), _shared(model)
    sharded = ShardedParams(units, model.comm, policy, split_stages=split, shared=shared)
    model.materialize([name for name, param in model.params.items() if param.is_meta])
    chains = [list(blocks.values()) for blocks in model.stages.values()]
    gather_on_demand(
        [[Needs(block, units_of(block.parameters(), sharded.units)) for block in blocks] for blocks in chains]
    )
    return sharded


def _shared(model: ParallelModel) -> frozenset[str]:
    """Parameters that more than one stage of this rank uses."""
    users = Counter(id(param) for stage in model.stages.values() for param in stage.parameters())
    return frozenset(name for name, param in model.params.items() if users[id(param)] > 1)


def _units(model: ParallelModel, policy: ShardingPolicy) -> Iterator[ParamGroup]:
    """Parameters of equal stage, block, reduce axes; a parameter tied to one on another pipeline rank stands alone, so that
    both ranks cut it alike."""
    far, frozen = {link.name for link in model.cross_stage_ties}, model.frozen
    still = replace(policy, zero=3 if policy.zero == 3 else 0, params=policy.compute)
    names = [name for name, param in model.params.items() if param.requires_grad or name in frozen]

    def key(name: str) -> tuple[int, str, tuple[str, ...], str, bool]:
        piece, is_far = model.shards[name], name if name in far else ""
        return model.stage_of[name], name.partition(".")[0], piece.reduce_axes, is_far, name in frozen

    order = {name: place for place, name in enumerate(names)}
    for (stage, _, axes, _, is_frozen), group in groupby(sorted(names, key=lambda n: (key(n), order[n])), key=key):
        members = list(group)
        model.materialize([name for name in members if model.params[name].is_meta])
        params: dict[str, nn.Parameter] = {name: model.params[name] for name in members}
        yield ParamGroup(params, model.comm, still if is_frozen else policy, axes=axes, stage=stage)
