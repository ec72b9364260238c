"""Copies of plain blocks on the shards of one rank, with stand-ins and hooks for the sharding trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from weft.errors import Fault, PlanError
from weft.models.common.attention import Attend, overrides_forward
from weft.models.common.experts import PRODUCTS
from weft.models.common.init import path_below
from weft.models.common.layers import Loss, RegionHeads, RegionInput
from weft.models.common.linear_products import PRODUCT, Fp8Product
from weft.parallel.model.chain import replace_module
from weft.parallel.model.fingerprint import META
from weft.parallel.model.module_copy import copied_module
from weft.parallel.tensor.dims import Dims, ShardingError, is_sharded
from weft.parallel.tensor.sharded_modules import ShardedModules
from weft.parallel.tensor.sharding_mode import ShardingTrace, Value
from weft.parallel.tensor.stand_ins import (
    TracedAttention,
    TracedEmbedding,
    TracedHeads,
    TracedLoss,
    TracedRegion,
    TracedRegionInput,
    TracedRow,
)

MODULE_ATTRIBUTES = tuple(vars(nn.Module()))
"""What every module has of its own: containers of parameters, children and hooks."""


@dataclass(frozen=True)
class LocalParam:
    """A parameter as one rank holds it: local shape, and its dims."""

    shape: tuple[int, ...]
    dims: Dims


def local_block(
    name: str,
    block: nn.Module,
    params: Mapping[str, LocalParam],
    trace: ShardingTrace,
    copies: dict[int, Any],
) -> nn.Module:
    """A copy of a block with local parameters in place of whole ones.

    A module that several blocks hold is copied for each of them, since hooks name its block.

    Args:
        copies: the copies of other objects that blocks before this one hold, too, by id.
    """
    for path, param in block.named_parameters(remove_duplicate=False):
        key = id(param)
        if key not in copies:
            param_name = f"{name}.{path}"
            local = params[param_name]
            copies[key] = _local_copy(param_name, param, local, trace)
    copied = copied_module(block, copies)
    for module in block.modules():
        attributes = vars(module)
        containers = [attributes[name] for name in MODULE_ATTRIBUTES]
        for part in (module, attributes, *containers):
            copies.pop(id(part), None)
    return copied


def _local_copy(
    name: str, param: nn.Parameter, local: LocalParam, trace: ShardingTrace
) -> nn.Parameter:
    data = torch.empty(local.shape, dtype=param.dtype, device=META)
    copied = nn.Parameter(data, requires_grad=False)
    if any(map(is_sharded, local.dims)):
        value = Value(local.dims, inside=True)
    else:
        value = Value(local.dims, params=frozenset({name}))
    trace.set(copied, value)
    return copied


def instrument(
    name: str, block: nn.Module, kinds: ShardedModules, trace: ShardingTrace
) -> nn.Module:
    """The copied block, with stand-ins for its sharded modules."""
    for path, module in block.named_modules():
        full_path = path_below(name, path)
        module.register_forward_pre_hook(_locator(full_path, trace))
        if not module._modules:
            module.register_forward_pre_hook(_leaf(full_path, trace))
            module.register_forward_hook(lambda *_: trace.leave_leaf())
    sharded_experts = (experts.path for experts in kinds.experts)
    sharded = {*kinds.columns, *kinds.rows, *kinds.inner_rows, *sharded_experts}
    for path, module in _take_fp8(block):
        if path not in sharded:
            module.register_forward_pre_hook(_whole_rows(trace))
            if kinds.is_in_region(path):
                raise PlanError(_partial_rows_fault(path_below(name, path)))
    for path in kinds.columns:
        if not kinds.is_in_region(path):
            reader = _reader(path_below(name, path), trace)
            module = block.get_submodule(path)
            module.register_forward_pre_hook(reader)
    for module, stand_in in _stand_ins(name, block, kinds, trace):
        block = replace_module(block, module, stand_in)
    for path in kinds.regions:
        region = block.get_submodule(path)
        block = replace_module(block, region, TracedRegion(region, trace))
    return block


def _take_fp8(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linears and experts in fp8 with their paths; from now on they are traced as plain ones."""
    for path, module in block.named_modules():
        is_linear = isinstance(vars(module).pop(PRODUCT, None), Fp8Product)
        has_experts = vars(module).pop(PRODUCTS, {})
        if is_linear or has_experts:
            yield path, module


def _whole_rows(trace: ShardingTrace) -> PreHook:
    """A hook for a whole linear, or whole experts, in fp8: the gradient of its output must be whole, since a sum of rounded
    parts is not the rounded sum.
    """

    def check(_: nn.Module, args: tuple[Any, ...]) -> None:
        value = trace.value(args[0])
        if value.inside and not value.sharded:
            fault = _partial_rows_fault(trace.module)
            raise ShardingError(fault.what, fix=fault.fix)

    return check


def _partial_rows_fault(name: str) -> Fault:
    what = "computes in fp8 inside a tensor-parallel region, where each rank has a part of its gradient"
    fix = f"add {name.partition('.')[2]} to --precision.fp8_exclude"
    return Fault(name, what, fix=fix)


def _stand_ins(
    name: str, block: nn.Module, kinds: ShardedModules, trace: ShardingTrace
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """(module, what stands for it) of all that a block holds but declared regions; attention gets
    a traced implementation.
    """
    for path in kinds.rows:
        linear = block.get_submodule(path)
        assert isinstance(linear, nn.Linear), f"{path} was found to be a linear"
        yield linear, TracedRow(linear, trace)
    for path in kinds.embeddings:
        embedding = block.get_submodule(path)
        assert isinstance(embedding, nn.Embedding), f"{path} was found to be an embedding"
        yield embedding, TracedEmbedding(embedding, trace)
    for path, module in list(block.named_modules()):
        if isinstance(module, Attend) and not overrides_forward(module):
            module.implementation = TracedAttention(trace, path_below(name, path))
        elif isinstance(module, Loss):
            yield module, TracedLoss(module, path_below(name, path), trace)
        elif isinstance(module, RegionInput) and not kinds.is_in_region(path):
            yield module, TracedRegionInput(trace)
        elif isinstance(module, RegionHeads):
            yield module, TracedHeads(trace)


PreHook = Callable[[nn.Module, tuple[Any, ...]], Any]


def _reader(path: str, trace: ShardingTrace) -> PreHook:
    """A hook for a column-parallel linear."""

    def read(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = args
        entered = trace.read(x, path)
        return (entered, *others)

    return read


def _leaf(path: str, trace: ShardingTrace) -> PreHook:
    """A hook for a module without children, whose statistics are noted."""

    def enter(_: nn.Module, __: tuple[Any, ...]) -> None:
        trace.enter_leaf(path)

    return enter


def _locator(path: str, trace: ShardingTrace) -> PreHook:
    """A hook that notes where in the model an operation is."""

    def locate(_: nn.Module, __: tuple[Any, ...]) -> None:
        trace.module = path

    return locate
