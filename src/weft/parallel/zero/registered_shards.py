"""Shards registered on modules in place of their parameters, and the check of them before each optimizer step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from weft.errors import Fault, PlanError
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_group import ParamGroup

REDUCER_OF_SHARD = "_weft_gradient_reducer"
"""Attribute of a shard: the reducer of its gradient."""


def make_shards(
    groups: Iterable[ParamGroup],
    reducer: GradientReducer,
) -> dict[str, nn.Parameter]:
    """This rank's entries of every parameter, as parameters that an optimizer takes."""
    found: dict[str, nn.Parameter] = {}
    for group in groups:
        assert group.sharded_param is not None, "under ZeRO 1 to 3 parameters are in flat memory"
        entries_of = group.layout.shard_views(group.sharded_param, group.index)
        for name, entries in entries_of.items():
            shard = nn.Parameter(entries, requires_grad=group.is_trained)
            setattr(shard, REDUCER_OF_SHARD, reducer)
            found[name] = shard
    return found


def register_shards(module: nn.Module, shard_of: Mapping[int, nn.Parameter]) -> None:
    """Register shards in place of parameters, which the forward still finds as plain attributes.

    An attribute in a module's `__dict__` comes before one in its `_parameters`: `module.weight` is
    the unsharded parameter, and `parameters()`, `named_parameters()` and `zero_grad()` have the
    shard.

    Args:
        shard_of: id of an unsharded parameter -> its shard.
    """
    for each in module.modules():
        registered = each._parameters
        for name, param in list(registered.items()):
            if param is None:
                continue
            registered[name] = shard_of[id(param)]
            object.__setattr__(each, name, param)


def _check_gradients_are_synchronized(
    optimizer: torch.optim.Optimizer,
    args: Any,
    kwargs: Any,
) -> None:
    """Called before each optimizer step: reject one whose gradients are not reduced yet.

    Raises:
        PlanError: gradients have arrived since the last `finish_gradient_synchronization`.
    """
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            reducer: GradientReducer | None = getattr(param, REDUCER_OF_SHARD, None)
            if reducer is not None and reducer.has_unfinished_gradients:
                fault = Fault(
                    "FullyShardedDataParallel",
                    "the gradients of the last backward were not synchronised before this "
                    "optimizer step",
                    fix="call finish_gradient_synchronization() after the last backward of a step",
                )
                raise PlanError(fault)


register_optimizer_step_pre_hook(_check_gradients_are_synchronized)
