"""States of a script's optimizer by parameter name: of this rank's shards, and whole ones for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from weft.errors import DataError, Fault, PlanError
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer, replaced_states
from weft.parallel.zero.sharded_tensor import ShardedTensor, adopt_group, shards_in

States = dict[str, Any]
"""`{"state": {parameter: {key: value}}, "param_groups": [{"params": [parameter], setting: value}]}`."""


def optimizer_states(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]], *, is_whole: bool
) -> States:
    """The states of the parameters `named`, under their names.

    Args:
        is_whole: whether sharded values are gathered, by a collective over all ranks; else they are
            `ShardedTensor`s.

    Raises:
        PlanError: the optimizer has another parameter.
    """
    name_of = {id(param): name for name, param in named}
    groups: list[dict[str, Any]] = []
    states: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        names = [_name(name_of, param) for param in group["params"]]
        settings = {
            key: value for key, value in group.items() if key not in ("params", "param_names")
        }
        groups.append({"params": names, **settings})
        for name, param in zip(names, group["params"], strict=True):
            state = _state_of(optimizer, param)
            adopt_group(shards_in((param, state)))
            if state:
                states[name] = {key: _value(each, is_whole=is_whole) for key, each in state.items()}
    return {"state": states, "param_groups": groups}


def load_optimizer_states(
    optimizer: Optimizer, named: Iterable[tuple[str, Tensor]], states: Mapping[str, Any]
) -> None:
    """Load what `optimizer_states` returned: whole states on any number of ranks.

    Raises:
        PlanError: the optimizer has another parameter, or shards are those of another rank.
        DataError: the groups have other parameters.
    """
    name_of = {id(param): name for name, param in named}
    loaded = states["param_groups"]
    groups = [
        [_name(name_of, param) for param in group["params"]] for group in optimizer.param_groups
    ]
    if [list(group["params"]) for group in loaded] != groups:
        fault = Fault(
            "optimizer states",
            "are of groups of other parameters",
            got=f"{len(loaded)} groups of {sum(len(group['params']) for group in loaded)} parameters",
            need=f"{len(groups)} groups of {sum(map(len, groups))}, with the same names in the same order",
            fix="make the optimizer with the groups that it had",
        )
        raise DataError(fault)
    with replaced_states(optimizer) as target:
        for group, loaded_group, names in zip(optimizer.param_groups, loaded, groups, strict=True):
            group.update({key: value for key, value in loaded_group.items() if key != "params"})
            for name, param in zip(names, group["params"], strict=True):
                shard = param
                if isinstance(optimizer, ShardedOptimizer):
                    shard = optimizer.shard_of(param)
                target.pop(shard, None)
                state = states["state"].get(name)
                if state:
                    target[shard] = {key: _own(key, value, shard) for key, value in state.items()}


def _name(name_of: Mapping[int, str], param: Tensor) -> str:
    name = name_of.get(id(param))
    if name is None:
        fault = Fault(
            "optimizer",
            "has a parameter that the wrapped module does not have",
            got=f"one of shape {list(param.shape)}",
            fix="pass an optimizer of net.parameters()",
        )
        raise PlanError(fault)
    return name


def _state_of(optimizer: Optimizer, param: Tensor) -> Mapping[str, Any]:
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.shard_state(param)
    state: Mapping[str, Any] = optimizer.state.get(param, {})
    return state


def _value(value: Any, *, is_whole: bool) -> Any:
    if is_whole and isinstance(value, ShardedTensor):
        return value.full_tensor().detach()
    return value.detach().clone() if isinstance(value, Tensor) else value


def _own(key: str, value: Any, shard: Tensor) -> Any:
    """A loaded value as the state of a tensor: of a whole one a shard keeps its entries."""
    if not isinstance(value, Tensor):
        return value
    is_alike = key != "step" and value.shape == shard.shape
    if not is_alike:
        return value.detach().clone()  # a count of steps stays where the optimizer keeps it
    if not isinstance(shard, ShardedTensor):
        return value.detach().to(shard.device, copy=True)
    own = shard.with_local(shard.local.detach().to(value.dtype, copy=True))
    return own.copy_(value.to(own.device))
