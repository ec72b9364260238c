"""Which tensors, and which entries of them, a rank of a plain script holds: of modules, wrapped or not, and of optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint.state import MODEL, OPTIMIZER, ParamState
from weft.comm.comm import Comm
from weft.core.axes import Box
from weft.core.mesh import axis_names
from weft.core.shard import Shard
from weft.errors import CheckpointError, Fault
from weft.parallel.autograd.holders import Holders, holders_of
from weft.parallel.autograd.rank_part import plain
from weft.parallel.model.parallelize import ParamShard
from weft.parallel.pipeline.module import PipelineParallel
from weft.parallel.pp import AXIS as PP
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.parallel.zero.sharded_tensor import ShardedTensor
from weft.parallel.zero.synchronized import SynchronizedModule

COMPILED = "_orig_mod"
"""Name of a module inside what torch.compile returns."""
WRAPPED = "module"
"""Name of a module inside weft's wrappers."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a model's parameters and buffers.

    Attributes:
        tensors: name in the unwrapped module -> parameter, shard or buffer.
        buffers: the names of buffers: where ranks differ, those of the first replica are stored.
        axes: mesh axes along which ranks hold other tensors: of pipelines.
    """

    tensors: Mapping[str, Tensor]
    buffers: frozenset[str]
    axes: tuple[str, ...] = ()


def held_by(model: nn.Module) -> Held:
    """The parameters and buffers of a model's state dict, by the names that they have unwrapped.

    Raises:
        CheckpointError: a state that is no tensor; a pipeline inside another module.
    """
    model = _unwrapped(model)
    if isinstance(model, PipelineParallel):
        found = model.local_tensors()
        return Held(found, _buffers_of(found), axes=(PP,))
    for name, inner in model.named_modules():
        if isinstance(inner, PipelineParallel):
            what = "is a pipeline inside another module, whose stages are on several ranks"
            raise CheckpointError(Fault(name, what, fix="save the pipeline by itself"))
    prefixes = [
        (f"{name}.{_inner_name(inner)}.", f"{name}.")
        for name, inner in model.named_modules()
        if name and _inner_name(inner)
    ]
    tensors: dict[str, Tensor] = {}
    for key, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, Tensor):
            what = "is a state that is no tensor"
            fix = "pass it in values, and leave it out of the state dict"
            raise CheckpointError(Fault(key, what, got=type(value).__name__, fix=fix))
        for wrapped, unwrapped in reversed(prefixes):
            if key.startswith(wrapped):
                key = unwrapped + key.removeprefix(wrapped)
        tensors[key] = value
    return Held(tensors, _buffers_of(tensors))


def _buffers_of(tensors: Mapping[str, Tensor]) -> frozenset[str]:
    return frozenset(
        name
        for name, each in tensors.items()
        if not isinstance(each, (nn.Parameter, ShardedTensor))
    )


def _unwrapped(model: nn.Module) -> nn.Module:
    name = _inner_name(model)
    while name:
        model = getattr(model, name)
        name = _inner_name(model)
    return model


def _inner_name(module: nn.Module) -> str:
    if isinstance(module, SynchronizedModule):
        return WRAPPED
    return COMPILED if COMPILED in module._modules else ""


def comm_of(model: nn.Module, optimizer: Optimizer | None) -> Comm | None:
    """The communication that a wrapper, a sharded layer or a sharded optimizer has; None of plain ones."""
    for module in model.modules():
        if isinstance(module, (SynchronizedModule, PipelineParallel)):
            return module.comm
    for param in model.parameters():
        holders = holders_of(param)
        if holders is not None:
            return holders.comm
    return optimizer.comm if isinstance(optimizer, ShardedOptimizer) else None


def model_states(held: Held, comm: Comm) -> Iterator[ParamState]:
    """The entries of parameters and buffers on this rank."""
    for name, tensor in held.tensors.items():
        state = _state_of(name, tensor, comm, section=MODEL, axes=held.axes, like=tensor)
        if name in held.buffers:
            state = replace(state, num_replicas=1, replica=0, is_alias=state.replica > 0)
        yield state


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[int, str]
) -> Iterator[tuple[str, Tensor, Mapping[str, Any]]]:
    """(name, parameter, its state) of each parameter of an optimizer.

    Args:
        names: id of a parameter -> its name.

    Raises:
        CheckpointError: the model does not have a parameter of the optimizer.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            yield name_of(names, param), param, state_of_param(optimizer, param)


def name_of(names: Mapping[int, str], param: Tensor) -> str:
    name = names.get(id(param))
    if name is None:
        fault = Fault(
            "optimizer",
            "has a parameter that the model does not have",
            got=f"one of shape {list(param.shape)}",
            fix="pass the model whose parameters it updates",
        )
        raise CheckpointError(fault)
    return name


def names_of(held: Held) -> dict[int, str]:
    """id of a parameter -> its first name; tied parameters have several."""
    found: dict[int, str] = {}
    for name, tensor in held.tensors.items():
        found.setdefault(id(tensor), name)
    return found


def updated_tensor(optimizer: Optimizer, param: Tensor) -> Tensor:
    """What is updated for a parameter: the parameter, or this rank's shard of it."""
    return optimizer.shard_of(param) if isinstance(optimizer, ShardedOptimizer) else param


def state_of_param(optimizer: Optimizer, param: Tensor) -> dict[str, Any]:
    """The state that an optimizer keeps of a parameter on this rank; empty before the first step."""
    if isinstance(optimizer, ShardedOptimizer):
        return optimizer.shard_state(param)  # with the values of states in 8 bits
    state: dict[str, Any] = optimizer.state.get(param, {})
    return state


def optimizer_state(
    name: str, key: str, value: Tensor, *, param: Tensor, held: Held, comm: Comm
) -> ParamState:
    """The entries on this rank of one state of a parameter.

    Raises:
        CheckpointError: of a parameter of which other ranks hold other entries, and of another shape.
    """
    holders = holders_of(param)
    shape = value.entries.shape if isinstance(value, ShardedTensor) else value.shape
    is_alike = shape == param.shape and key != "step"
    if holders is not None and not is_alike and value.numel() > 1:
        fault = Fault(
            f"{OPTIMIZER}/{key}/{name}",
            "is a state of another shape than its parameter, which is sharded by its layer",
            got=str(list(value.shape)),
            need=str(list(param.shape)),
            fix="leave this parameter whole, or use an optimizer such as AdamW",
        )
        raise CheckpointError(fault)
    like = param if is_alike else value
    return _state_of(name, value, comm, section=f"{OPTIMIZER}/{key}", axes=held.axes, like=like)


def _state_of(
    name: str, tensor: Tensor, comm: Comm, *, section: str, axes: tuple[str, ...], like: Tensor
) -> ParamState:
    """This rank's entries of a tensor.

    Args:
        axes: mesh axes along which ranks hold other tensors.
        like: a tensor whose layer shards it alike.
    """
    own_shape = tensor.entries.shape if isinstance(tensor, ShardedTensor) else tuple(tensor.shape)
    shape, shard, shard_axes = _whole(own_shape, holders_of(like))
    tensor = plain(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
        shape, shard = (*shape, 2), _with_pairs(shard)
    local, lo, hi = tensor, 0, tensor.numel()
    if isinstance(tensor, ShardedTensor):
        local, lo, hi = tensor.local, tensor.entries.own.start, tensor.entries.own.stop
        group = tensor.group or (like.group if isinstance(like, ShardedTensor) else None)
        shard_axes += axis_names(group.axis) if group is not None else ()
    replica_axes = tuple(axis for axis, _ in comm.mesh.axes if axis not in (*axes, *shard_axes))
    return ParamState(
        param=ParamShard(name, name, shape, shard, shard_axes, reduce_axes=(), logical=()),
        lo=lo,
        hi=hi,
        tensors={section: local.detach()},
        whole={},
        replica_axes=replica_axes,
        num_replicas=comm.degree(replica_axes),
        replica=comm.index(replica_axes),
        is_alias=False,
    )


def _whole(
    shape: tuple[int, ...], holders: Holders | None
) -> tuple[tuple[int, ...], Shard, tuple[str, ...]]:
    """Shape of the whole tensor, the part of it that this rank's layer has, and the axes that shard it."""
    if holders is None:
        return shape, Shard((Box.whole(shape),)), ()
    dim = holders.dim
    bounds = [(0, length) for length in shape]
    boxes = [
        Box.of_spans([*bounds[:dim], own, *bounds[dim + 1 :]])
        for own in holders.spans
        if own[0] < own[1] or len(holders.parts) == 1
    ]
    return holders.whole_shape(shape), Shard(tuple(boxes), dim), holders.axes


def _with_pairs(shard: Shard) -> Shard:
    """That of complex numbers as pairs of real ones."""
    boxes = tuple(Box((*box.lo, 0), (*box.hi, 2)) for box in shard.boxes)
    return Shard(boxes, shard.dim)


def with_entries(states: Iterable[ParamState]) -> list[ParamState]:
    """Those of which this rank has entries."""
    return [each for each in states if each.lo < each.hi]
