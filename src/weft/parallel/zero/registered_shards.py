"""Shards registered on modules in place of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.wrapped_params import mark_wrapped

WRAPPER_NAME = "FullyShardedDataParallel"


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
            found[name] = shard
        mark_wrapped(group.params.values(), WRAPPER_NAME, reducer=None)
    mark_wrapped(found.values(), WRAPPER_NAME, reducer=reducer, is_shard=True)
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
