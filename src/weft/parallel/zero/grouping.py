"""Which parameters form a group: buckets of equal size under ZeRO 0, the blocks of the model under ZeRO 1 to 3."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from weft.core.axes import state_axes
from weft.core.zero_stages import ZERO_THAT_REDUCES_EACH
from weft.layout.plan import Plan
from weft.parallel.model.parallelize import ParallelModel
from weft.parallel.zero.backward_order import register_backward_order
from weft.parallel.zero.buckets import buckets_of
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.quantized_group import QuantizedGroup
from weft.parallel.zero.sharding_policy import ShardingPolicy
from weft.parallel.zero.unshard_hooks import BlockGroups, groups_of, register_unshard_hooks


def make_gradient_reducer(model: ParallelModel, *, fixed_order: bool = False) -> GradientReducer:
    """The gradient reducer of this rank's part of a model, as the plan's ZeRO stage and dtypes say.

    A model on the meta device is materialised group by group, so that under ZeRO 3 no rank ever
    holds all of its part.

    Args:
        fixed_order: whether the bits of gradients are the same for every number of data ranks.
    """
    policy = replace(sharding_policy(model.plan), fixed_order=fixed_order)
    quantized = list(_quantized_groups(model, policy))
    groups: list[ParamGroup] = [*quantized]
    if policy.zero == 0:
        groups += _bucket_groups_of(model, policy)
    else:
        groups += _block_groups(model, policy)
    grouped: set[str] = set()
    for group in groups:
        grouped.update(group.params)
    ungrouped: dict[str, nn.Parameter] = {
        name: param for name, param in model.params.items() if name not in grouped
    }
    model.materialize([name for name, param in ungrouped.items() if param.is_meta])
    split_stages = frozenset(stage for stage, _ in model.plan.table.splits)
    reducer = GradientReducer(
        groups,
        model.comm,
        reduces_every_backward=policy.zero >= ZERO_THAT_REDUCES_EACH,
        split_stages=split_stages,
        shared=frozenset(name for name, count in _stage_counts(model).items() if count > 1),
        ungrouped=ungrouped,
        quantized={name: group for group in quantized for name in group.params},
    )
    chains: list[list[BlockGroups]] = []
    for number, stage in model.stages.items():
        # Before the hooks that unshard: hooks are called in the order of their registration, and on
        # every rank the reductions behind a block come before the next all-gather.
        register_backward_order(reducer, number, tuple(stage.values()))
        chain: list[BlockGroups] = []
        for block in stage.values():
            used = groups_of(block.parameters(), groups)
            chain.append(BlockGroups(block, used))
        chains.append(chain)
    register_unshard_hooks(chains)
    return reducer


def sharding_policy(plan: Plan) -> ShardingPolicy:
    """The sharding policy of a plan: sums over the ranks, in memory that stays allocated up to ZeRO
    1.
    """
    return ShardingPolicy(
        plan.zero,
        params=getattr(torch, plan.params),
        compute=getattr(torch, plan.compute),
        reduce=getattr(torch, plan.reduce),
        keeps_unsharded_grad=plan.zero <= 1,
    )


def _quantized_groups(model: ParallelModel, policy: ShardingPolicy) -> Iterator[QuantizedGroup]:
    """Frozen matrices that are held in 4 bits, block by block: each block's are quantized before
    those of the next have memory.
    """
    of_blocks: dict[tuple[int, str, tuple[str, ...]], list[str]] = {}
    for name in model.quantized:
        axes = model.shards[name].reduce_axes if policy.zero == 3 else ()
        key = (model.stage_of[name], name.partition(".")[0], axes)
        of_blocks.setdefault(key, []).append(name)
    stage_counts = _stage_counts(model)
    for (stage, _, axes), names in of_blocks.items():
        model.materialize([name for name in names if model.params[name].is_meta])
        yield QuantizedGroup(
            {name: model.params[name] for name in names},
            model.comm,
            replace(policy, zero=3, params=policy.compute),
            dims=model.quantized,
            double=model.has_double_blocks,
            axes=state_axes(model.comm.mesh, axes).sharded,
            stage=stage,
            num_stages=max(stage_counts[name] for name in names),
        )


# ZeRO 0: buckets


def _bucket_groups_of(model: ParallelModel, policy: ShardingPolicy) -> list[ParamGroup]:
    """Trained parameters in buckets; frozen ones in a group of their own where they are cast to the
    compute dtype.
    """
    frozen_names = model.frozen
    frozen: dict[str, nn.Parameter] = {}
    trained: dict[str, nn.Parameter] = {}
    for name, param in model.params.items():
        if param.requires_grad:
            trained[name] = param
        elif name in frozen_names and name not in model.quantized:
            frozen[name] = param
    reduce_axes = {name: shard.reduce_axes for name, shard in model.shards.items()}
    buckets = buckets_of(
        trained,
        reduce_axes=reduce_axes,
        stage_of=model.stage_of,
        bucket_bytes=model.plan.bucket_bytes,
    )
    groups: list[ParamGroup] = []
    if frozen and policy.params != policy.compute:
        frozen_policy = replace(policy, params=policy.compute)
        frozen_group = ParamGroup(frozen, model.comm, frozen_policy, axes=())
        groups.append(frozen_group)
    stage_counts = _stage_counts(model)
    for bucket in buckets:
        group = bucket.group(trained, model.comm, policy, stage_counts=stage_counts)
        groups.append(group)
    return groups


# ZeRO 1 to 3: blocks


class BlockKey(NamedTuple):
    """What the parameters of a block's group have in common.

    `alone` is the parameter's own name where no other may be in its group: another pipeline rank
    holds a copy, which both shard alike then; or ranks have unequally many entries of it, such as
    of a vocabulary that tp does not divide, behind which those of the others would be cut at different
    places on ranks that hold the same.
    """

    stage: int
    block: str
    axes: tuple[str, ...]
    alone: str
    is_frozen: bool


def _block_groups(model: ParallelModel, policy: ShardingPolicy) -> list[ParamGroup]:
    """Trained and frozen parameters, grouped by `BlockKey`; the biases of routers, which are
    neither, stay as they are.
    """
    frozen = model.frozen
    tied = {link.name for link in model.cross_stage_ties}
    members: dict[BlockKey, list[str]] = {}
    for name, param in model.params.items():
        is_frozen = name in frozen and name not in model.quantized
        if not param.requires_grad and not is_frozen:
            continue
        key = BlockKey(
            stage=model.stage_of[name],
            block=name.partition(".")[0],
            axes=model.shards[name].reduce_axes,
            alone=name if name in tied or _is_uneven(model, name) else "",
            is_frozen=is_frozen,
        )
        names = members.setdefault(key, [])
        names.append(name)
    frozen_policy = replace(policy, zero=3 if policy.zero == 3 else 0, params=policy.compute)
    groups: list[ParamGroup] = []
    stage_counts = _stage_counts(model)
    for key, names in members.items():
        model.materialize([name for name in names if model.params[name].is_meta])
        axes = state_axes(model.comm.mesh, key.axes)
        group = ParamGroup(
            {name: model.params[name] for name in names},
            model.comm,
            frozen_policy if key.is_frozen else policy,
            axes=axes.sharded,
            replicate_axes=axes.replicated,
            stage=key.stage,
            num_stages=max(stage_counts[name] for name in names),
        )
        groups.append(group)
    return groups


def _is_uneven(model: ParallelModel, name: str) -> bool:
    """Whether the ranks that a parameter is sharded over have unequally many entries of it."""
    shard = model.shards[name]
    return shard.shard.size * model.comm.degree(shard.shard_axes) != math.prod(shard.shape)


def _stage_counts(model: ParallelModel) -> dict[str, int]:
    """How many stages of this rank use each parameter."""
    num_stages: Counter[int] = Counter()
    for stage in model.stages.values():
        ids = map(id, stage.parameters())
        num_stages.update(ids)
    return {name: num_stages[id(param)] for name, param in model.params.items()}
