"""Owns `FullyShardedDataParallel`: parameters, gradients and optimizer states of any module spread over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm.adopt import comm_or_world
from weft.comm.comm import Comm
from weft.core.mesh import Axis, axis_names
from weft.errors import DataError, Fault, PlanError
from weft.parallel.model.tree import map_leaves
from weft.parallel.zero.gradient_reducer import ShardedParams
from weft.parallel.zero.meta_init import fill, own_modules, own_params
from weft.parallel.zero.param_group import ParamGroup, ShardingPolicy
from weft.parallel.zero.unshard_hooks import Needs, gather_on_demand, units_of

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules that are looked through: what they hold is what runs."""


class FullyShardedDataParallel(nn.Module):
    """A module of which every rank holds a part; a block's parameters are gathered while it runs, gradients are averaged.

        net = weft.FullyShardedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net(x).sum().backward()
        net.finish_gradient_synchronization()
        net.clip_grad_norm_(1.0)
        optimizer.step()

    Starts from the first rank's parameters and buffers. `parameters()` are this rank's entries of each parameter, flat: an
    optimizer that moves every entry by itself (SGD, Adam and their like) moves them. Setting gradients to None or to zero
    between steps is fine; frozen, unused and tied parameters, uneven shapes and several backwards a step are.

    Args:
        module: any module. One on the meta device gets its values block by block, by `reset_parameters` of the modules
            that own parameters: no rank ever holds it whole.
        comm: this rank's way to the others; None: the world that torch.distributed was initialised with is the data axis.
        axis: the mesh axis (or axes) over which batches differ and parameters are spread.
        zero: 1 spreads optimizer states, 2 gradients too, 3 parameters too.
        blocks: modules whose parameters are gathered together, in the order in which they run. They must be called, their
            weights are there only while they run. Default: the children that have parameters; lists and Sequentials are
            looked through. What belongs to no block is there while the whole module runs.
        compute: dtype in which the module runs; its floating-point inputs and those of blocks are cast to it. Default: that
            of the parameters.
        reduce: dtype in which gradients are summed over backwards and ranks. Default: that of the parameters.

    Source: Zhao et al. 2023, PyTorch FSDP; Rajbhandari et al. 2020, ZeRO.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        *,
        axis: Axis = "dp",
        zero: Literal[1, 2, 3] = 3,
        blocks: Iterable[nn.Module] | None = None,
        compute: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        device = next((param.device for param in module.parameters() if not param.is_meta), torch.device("cpu"))
        self.module, self.comm = module, comm_or_world(comm, axis=axis, device=device)
        self.axis, self.zero, self.compute, self.reduce = axis, zero, compute, reduce
        chain = (*(default_blocks(module) if blocks is None else blocks), module)
        params = {id(each): own_params(each, chain) for each in chain}
        self._name_of = {id(param): name for name, param in module.named_parameters()}
        state = module.state_dict(keep_vars=True)
        self._keys = {key: self._name_of.get(id(x), key) for key, x in state.items() if isinstance(x, Tensor)}
        units = tuple(self._make_units(chain))
        self._sharded = ShardedParams(units, self.comm, self._policy(torch.float32))
        needs = [Needs(each, units_of(params[id(each)], units)) for each in chain]
        gather_on_demand([needs[:-1], needs[-1:]])
        for each in chain[:-1]:
            each.register_forward_pre_hook(lambda _, args, kwargs: self._cast((args, kwargs)), with_kwargs=True)
        self._shard_of = {name: shard for unit in units for name, shard in _as_parameters(unit).items()}
        self.shards = _tree(self._shard_of)
        _hide_parameters(module)
        self._is_stale, self._synchronize = False, True

    def _make_units(self, chain: tuple[nn.Module, ...]) -> Iterator[ParamGroup]:
        """Units of what each block owns and no block before it had: alike in dtype, all trained or all frozen."""
        axes = axis_names(self.axis) if self.comm.degree(self.axis) > 1 else ()
        taken: set[int] = set()
        for block in chain:
            fill(block, chain, self.comm, self.axis, taken=taken)
            fresh = [param for param in own_params(block, chain) if id(param) not in taken]
            taken |= set(map(id, fresh))
            for _, group in groupby(sorted(fresh, key=_kind), key=_kind):
                members = {self._name_of[id(param)]: param for param in group}
                yield ParamGroup(members, self.comm, self._policy(next(iter(members.values())).dtype), axes=axes)

    def _policy(self, dtype: torch.dtype) -> ShardingPolicy:
        return ShardingPolicy(
            self.zero,
            params=dtype,
            compute=self.compute or dtype,
            reduce=self.reduce or dtype,
            share=1.0 / self.comm.degree(self.axis),
            keeps_grad=False,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        if self._is_stale:
            self._sharded.after_optimizer_step()
        if torch.is_grad_enabled():
            self._is_stale = False  # without gradients: values may still move before the forward that trains
            self._sharded.defers = self.zero == 1 or not self._synchronize
            if self._synchronize:
                self._sharded.set_requires_gradient_sync(0)
        args, kwargs = self._cast((args, kwargs))
        return self.module(*args, **kwargs)

    def _cast(self, given: Any) -> Any:
        """The same arguments, floating-point tensors in the dtype of compute."""
        dtype = self.compute
        if dtype is None:
            return given
        return map_leaves(given, Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate locally, whole gradients: backwards of forwards in here reduce nothing."""
        self._synchronize = False
        try:
            yield
        finally:
            self._synchronize = True

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks. Call once, after the last backward of a step."""
        self._sharded.finish()
        for unit in self._sharded.trained:
            for name, gradient in unit.give_gradient().items():
                shard = self._shard_of[name]
                shard.grad = gradient if shard.grad is None else shard.grad.add_(gradient)
        self._is_stale = True

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns the norm before, float64.

        torch.nn.utils.clip_grad_norm_ would take the norm of this rank's entries.
        """
        gradients = [shard.grad for shard in self._shard_of.values() if shard.grad is not None]
        total = torch.zeros((), dtype=torch.float64, device=self.comm.device)
        for gradient in gradients:
            total += gradient.double().square().sum()
        norm = self.comm.all_reduce(total, self.axis).sqrt()
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict that the module would have had unwrapped, whole on every rank; every rank must ask."""
        state = {**self._sharded.full_parameters(), **dict(self.module.named_buffers())}
        return {key: state[name].detach().clone() for key, name in self._keys.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's part of a state dict of the unwrapped module.

        Raises:
            DataError: keys are missing or unknown.
        """
        if wrong := sorted(state.keys() ^ self._keys.keys()):
            have = "missing or unknown keys: " + ", ".join(wrong[:8])
            raise DataError(Fault("state", have, f"{len(state)} keys", f"the {len(self._keys)} of full_state_dict()"))
        whole = {name: state[key] for key, name in self._keys.items()}
        for unit in self._sharded.units:
            unit.take_values({name: whole[name] for name in unit.params})
        for name, buffer in self.module.named_buffers():
            if name in whole:
                buffer.copy_(whole[name])
        self._is_stale = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FullyShardedDataParallel:
        """Only what changes nothing can be done to all tensors: the shards lie in flat memory."""
        if any(fn(x) is not x for x in (*self.parameters(), *self.buffers())):
            raise PlanError(Fault("FullyShardedDataParallel", "its module cannot be moved or cast once it is wrapped"))
        return self


def default_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The children that have parameters; containers are looked through."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from default_blocks(child)
        elif next(child.parameters(), None) is not None:
            yield child


def _kind(param: nn.Parameter) -> tuple[str, bool]:
    return str(param.dtype), param.requires_grad


def _as_parameters(unit: ParamGroup) -> dict[str, nn.Parameter]:
    entries = unit.layout.shard_views(unit.shard, unit.index)
    return {name: nn.Parameter(each, requires_grad=unit.is_trained) for name, each in entries.items()}


def _tree(params: Mapping[str, nn.Parameter]) -> nn.Module:
    """Modules that hold these parameters under their dotted names."""
    root = nn.Module()
    for name, param in params.items():
        *path, leaf = name.split(".")
        parent = root
        for step in path:
            if step not in parent._modules:
                parent.add_module(step, nn.Module())
            parent = parent.get_submodule(step)
        parent.register_parameter(leaf, param)
    return root


def _hide_parameters(module: nn.Module) -> None:
    """Make parameters plain attributes: what an optimizer finds below the wrapper are the shards."""
    for _, each in own_modules(module, ()):
        for name in list(each._parameters):
            param = each._parameters.pop(name)
            object.__setattr__(each, name, param)
