"""The parameters of a wrapped module: the objects that scripts hold become shards, blocks compute with others.

Note [Two tensors for a parameter]
    An optimizer may hold a parameter before its module is wrapped, and scripts freeze, read and save it
    later. So the object that the module had stays its parameter, as a shard: `swap_tensors` puts this rank's
    entries into it. The unsharded values move to another object, which blocks compute with: an attribute in
    a module's `__dict__` comes before one in its `_parameters`, so `module.weight` is the unsharded one, while
    `parameters()`, `named_parameters()` and `state_dict()` have the shard.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from weft.errors import Fault, PlanError
from weft.parallel.autograd.holders import Holders
from weft.parallel.zero.flat_params import FlatLayout
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.shard_entries import ShardEntries, ShardGroup
from weft.parallel.zero.sharded_functions import sharded_param

WRAPPER_NAME = "FullyShardedDataParallel"


def move_values(module: nn.Module) -> dict[int, nn.Parameter]:
    """Move the values of every parameter to a new object, which takes its place in the modules.

    Returns:
        id of the new parameter -> the object that was registered, empty now.

    Raises:
        PlanError: a parameter has hooks, or a graph of an earlier forward is still alive.
    """
    _drop_graphs(module)
    moved: dict[int, nn.Parameter] = {}
    originals: dict[int, nn.Parameter] = {}
    for name, original in module.named_parameters():
        _check_no_hooks(name, original)
        new = nn.Parameter(torch.empty(0), requires_grad=False)
        _swap(name, original, new)
        original.__dict__.update(new.__dict__)  # what scripts have noted on it
        new._post_accumulate_grad_hooks = original._post_accumulate_grad_hooks
        setattr(original, "_post_accumulate_grad_hooks", None)  # noqa: B010 - typed as never None
        moved[id(original)] = new
        originals[id(new)] = original
    for each in module.modules():
        for key, param in each._parameters.items():
            if param is not None:
                each._parameters[key] = moved[id(param)]
    return originals


def register_shards(module: nn.Module, shard_of: Mapping[int, nn.Parameter]) -> None:
    """Register shards in place of unsharded parameters, which the forward still finds as plain
    attributes. See Note [Two tensors for a parameter].

    Args:
        shard_of: id of an unsharded parameter -> its shard.
    """
    for each in module.modules():
        for name, param in each._parameters.items():
            if param is not None:
                each._parameters[name] = shard_of[id(param)]
                object.__setattr__(each, name, param)
        if isinstance(each, nn.RNNBase):
            _set_weights(each)


def _set_weights(layer: nn.RNNBase) -> None:
    """Have a recurrent layer compute with the parameters that it has now, where they are: cuDNN would move them
    into memory of its own.
    """
    weights = [getattr(layer, name, None) for name in layer._flat_weights_names]
    layer._flat_weights = weights
    # by which the layer finds others in their place, as of `functional_call`
    layer._flat_weight_refs = [None if each is None else weakref.ref(each) for each in weights]
    setattr(layer, "flatten_parameters", _keep_memory)  # noqa: B010 - a method for type checkers


def _keep_memory() -> None:
    """In the place of `flatten_parameters` of recurrent layers."""


def make_shards(
    groups: list[ParamGroup],
    group: ShardGroup,
    *,
    originals: Mapping[int, nn.Parameter],
    holders: Mapping[str, Holders | None],
) -> dict[str, nn.Parameter]:
    """This rank's entries of every parameter, put into the objects that the module had.

    Args:
        originals: as `move_values` returns them.
        holders: name of a parameter -> who holds its other entries, where its layer is sharded besides.
    """
    found: dict[str, nn.Parameter] = {}
    for each in groups:
        assert each.sharded_param is not None, "under ZeRO 1 to 3 parameters are in flat memory"
        views = each.layout.shard_views(each.sharded_param, each.index)
        for name, param in each.params.items():
            shard_group = ShardGroup(group.comm, group.axis, holders[name])
            entries = entries_of(each.layout, name, each.index)
            shard = sharded_param(
                views[name], entries, shard_group, requires_grad=param.requires_grad
            )
            original = originals[id(param)]
            shard.__dict__.update(original.__dict__)
            _swap(name, original, shard)
            found[name] = original
    return found


def entries_of(layout: FlatLayout, name: str, index: int) -> ShardEntries:
    """Which entries of a parameter the shards of a layout have."""
    span = next(each for each in layout.spans if each.name == name)
    length = span.stop - span.start
    starts = [layout.shard_slice(rank).start - span.start for rank in range(layout.num_shards)]
    inside = [min(max(start, 0), length) for start in starts]
    return ShardEntries(span.shape, (*inside, length), index)


def _swap(name: str, one: nn.Parameter, other: nn.Parameter) -> None:
    """Exchange what two parameter objects are.

    Raises:
        PlanError: a graph or a weak reference holds one of them.
    """
    try:
        torch.utils.swap_tensors(one, other)
    except RuntimeError as error:
        fault = Fault(
            WRAPPER_NAME,
            f"{name} is in use: a graph of an earlier forward, or a weak reference, holds it",
            fix="wrap the module before its first forward, or delete the loss and outputs first",
        )
        raise PlanError(fault) from error


def _drop_graphs(module: nn.Module) -> None:
    """Detach tensors that modules have computed of their parameters and compute again in each forward, such
    as the weight of `nn.utils.weight_norm`: their graphs hold the parameters. Drop the weak references that
    recurrent layers hold.
    """
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            each._flat_weight_refs = []
        for key, value in list(vars(each).items()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                each.__dict__[key] = value.detach()


def _check_no_hooks(name: str, param: nn.Parameter) -> None:
    """Raise PlanError for hooks, which would be called with unsharded gradients of this rank alone."""
    hooks = [*(param._backward_hooks or {}).values()]
    hooks += (getattr(param, "_post_accumulate_grad_hooks", None) or {}).values()
    if hooks:
        fault = Fault(
            WRAPPER_NAME,
            f"{name} has hooks from before wrapping, which would not see the synchronised gradient",
            fix="register hooks on net.parameters() after wrapping",
        )
        raise PlanError(fault)
