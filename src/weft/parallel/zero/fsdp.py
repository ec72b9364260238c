"""`FullyShardedDataParallel`: parameters, gradients and optimizer states of any module sharded over ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.comm.default_comm import comm_or_world
from weft.core.mesh import Axis, axis_names
from weft.errors import Fault, PlanError
from weft.parallel.autograd.shard_gradient import (
    PendingGradient,
    ShardGradient,
    clip_to,
    pending_gradient,
    reject_unsynchronized_use,
    shard_axes_of,
    total_norm,
)
from weft.parallel.autograd.tree import map_leaves
from weft.parallel.dp import AXIS as DP
from weft.parallel.model.buffers import broadcast_buffers
from weft.parallel.zero.backward_order import register_backward_order
from weft.parallel.zero.global_mean import global_mean
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.meta_init import init_block, own_params
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.registered_shards import WRAPPER_NAME, make_shards, register_shards
from weft.parallel.zero.sharding_policy import ShardingPolicy
from weft.parallel.zero.unshard_hooks import (
    BlockGroups,
    groups_of,
    register_unshard_hooks,
)
from weft.parallel.zero.wrapped_params import (
    check_all_wrapped,
    check_not_wrapped,
    check_requires_grad,
    check_state_keys,
    reject_copy,
    reject_other_memory,
    trained_when_wrapped,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose children are blocks."""
UNCALLED = (nn.ParameterList, nn.ParameterDict)
"""Modules without a forward: their parameters belong to the module that has them."""


class FullyShardedDataParallel(nn.Module):
    """A module that each rank holds a shard of; a block's parameters are all-gathered while it
    runs, gradients are averaged.

        net = weft.FullyShardedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net(x).sum().backward()
        net.finish_gradient_synchronization()
        net.clip_grad_norm_(1.0)
        optimizer.step()

    Starts from the first rank's parameters and buffers, and has the first rank's buffers after each
    `finish_gradient_synchronization()`, as `DistributedDataParallel`. `named_parameters()` has the module's own
    names; a parameter there is this rank's entries of it, one-dimensional: any optimizer that
    updates each entry by itself (SGD, Adam and their like) updates them. Optimizer groups are chosen
    by name: `param.ndim` is 1 for all. Inside the forward of its block `module.weight` is the
    unsharded parameter; under `zero=3` it is NaN elsewhere. Gradients may be set to None or to zero
    between steps; frozen, unused and tied parameters, uneven shapes and several backwards a step are
    allowed. A parameter that no rank has used since the last step keeps the `.grad` it had: None
    at first and after `zero_grad()`, zeros after `zero_grad(set_to_none=False)` of a gradient, as
    in one process.

    Every rank runs the same blocks in the same order, since each is all-gathered by all ranks: a
    block that only some ranks run is a MismatchError, which names the collectives and the
    parameters that were being gathered. Run it on the other ranks too, with a result of weight 0,
    or let ranks differ within a block.
    `state_dict()` has this rank's shards under the names of `named_parameters()`;
    `full_state_dict()` has the unsharded values.

    Args:
        module: any module. One on the meta device gets its values block by block, by
            `reset_parameters` of the modules that own parameters: no rank ever holds it unsharded.
        comm: communication with the other ranks; None: the world of torch.distributed is the data
            axis.
        axis: the mesh axis (or axes) over which batches differ and parameters are sharded.
        zero: 1 shards optimizer states, 2 gradients too, 3 parameters too.
        blocks: modules whose parameters are gathered together, in the order in which they run. They
            must be called: their weights are allocated only while they run. Default: the children
            that have parameters, and the children of lists and Sequentials among them. What belongs
            to no block is allocated while the whole module runs.
        compute: dtype in which the module runs; its floating-point inputs and those of blocks are
            cast to it. Default: that of the parameters.
        reduce: dtype in which gradients are accumulated and reduced. Default: that of the
            parameters.

    Raises:
        PlanError: a parameter belongs to a wrapped module already, or is added, frozen or unfrozen after
            wrapping; an optimizer that was made before wrapping steps, or one steps after a
            backward whose gradients were not synchronised.

    Source: Zhao et al. 2023, PyTorch FSDP; Rajbhandari et al. 2020, ZeRO.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        *,
        axis: Axis = DP,
        zero: Literal[1, 2, 3] = 3,
        blocks: Iterable[nn.Module] | None = None,
        compute: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_not_wrapped(module, WRAPPER_NAME)
        self._trained_when_wrapped = trained_when_wrapped(module)
        self.module = module
        self.comm = comm_or_world(comm, axis=axis, device=_device_of(module))
        self.axis = axis
        self.zero = zero
        self.compute = compute
        self.reduce = reduce
        chosen = tuple(default_blocks(module) if blocks is None else blocks)
        chain = (*chosen, module)  # the module comes last, with the parameters of no block
        self._name_of = {id(param): name for name, param in module.named_parameters()}
        self._tensor_axes = {name: shard_axes_of(p) for name, p in module.named_parameters()}
        self._state_names = self._names_by_state_key()
        params_of_block = [own_params(block, chain) for block in chain]
        groups = self._make_groups(chain)
        self._reducer = GradientReducer(groups, self.comm)
        register_backward_order(self._reducer, 0, chosen)
        uses: list[BlockGroups] = []
        for block, params in zip(chain, params_of_block, strict=True):
            used_groups = groups_of(params, groups)
            uses.append(BlockGroups(block, used_groups))
        *block_uses, module_use = uses
        register_unshard_hooks([block_uses, [module_use]])
        for block in chosen:
            block.register_forward_pre_hook(self._cast_block_inputs, with_kwargs=True)
        for block in chain:
            block.register_forward_pre_hook(self._check_is_fresh)
        self._shard_of = make_shards(groups, self._reducer)
        self._addresses = {name: shard.data_ptr() for name, shard in self._shard_of.items()}
        shard_of_param: dict[int, nn.Parameter] = {}
        for param_id, name in self._name_of.items():
            shard_of_param[param_id] = self._shard_of[name]
        register_shards(module, shard_of_param)
        self._pending: dict[str, tuple[Tensor, int]] = {}
        self._reducer.call_after_backward(weakref.WeakMethod(self._hold_gradients))
        self._is_stale = False
        self._is_in_forward = False
        self._requires_gradient_sync = True

    def _names_by_state_key(self) -> dict[str, str]:
        """Key of the module's state dict -> name of the parameter or buffer; tied parameters have
        several keys.
        """
        found: dict[str, str] = {}
        state = self.module.state_dict(keep_vars=True)
        for key, value in state.items():
            if isinstance(value, Tensor):
                found[key] = self._name_of.get(id(value), key)
        return found

    def _make_groups(self, chain: tuple[nn.Module, ...]) -> list[ParamGroup]:
        """Groups of what each block uses and no block before it does, alike in dtype and in having
        gradients.

        The groups of the module itself come first: its parameters may be used anywhere, so they are
        reduced last.
        """
        grouped: set[int] = set()
        groups: list[ParamGroup] = []
        root_groups: list[ParamGroup] = []
        for block in chain:
            init_block(block, chain, self.comm, self.axis, initialised=grouped)
            new_params: list[nn.Parameter] = []
            for param in own_params(block, chain):
                if id(param) not in grouped:
                    new_params.append(param)
                    grouped.add(id(param))
            made = root_groups if block is self.module else groups
            made.extend(self._groups_of_alike(new_params))
        return root_groups + groups

    def _groups_of_alike(self, params: Iterable[nn.Parameter]) -> Iterator[ParamGroup]:
        """A group for each (dtype, whether they have gradients) of these parameters."""
        axes: tuple[str, ...] = ()
        if self.comm.degree(self.axis) > 1:
            axes = axis_names(self.axis)
        alike: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for param in params:
            kind = (param.dtype, param.requires_grad)
            members = alike.setdefault(kind, {})
            name = self._name_of[id(param)]
            members[name] = param
        for (dtype, _), members in alike.items():
            policy = self._policy(dtype)
            yield ParamGroup(members, self.comm, policy, axes=axes)

    def _policy(self, dtype: torch.dtype) -> ShardingPolicy:
        return ShardingPolicy(
            self.zero,
            params=dtype,
            compute=self.compute or dtype,
            reduce=self.reduce or dtype,
            grad_scale=1.0 / self.comm.degree(self.axis),
            keeps_sharded_grad=False,
            fills_freed_params=True,
        )

    def named_parameters(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards under the names that the module's parameters had unwrapped."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self,
        prefix: str = "",
        recurse: bool = True,
        remove_duplicate: bool = True,
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers under the names that they had unwrapped."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self,
        *args: Any,
        prefix: str = "",
        **kwargs: Any,
    ) -> dict[str, Any]:
        """This rank's shards, and the buffers, under the names of `named_parameters()`.

        As a part of another module's state dict the keys have `module.`, as that module's
        `named_parameters()` do.
        """
        state: dict[str, Any]
        if args or prefix:
            state = super().state_dict(*args, prefix=prefix, **kwargs)
        else:
            state = self.module.state_dict(**kwargs)
        return state

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        assign: bool = False,
    ) -> Any:
        """Load what `state_dict` returned on this rank.

        Raises:
            PlanError: `assign`, since the shards are views into flat memory.
        """
        if assign:
            raise PlanError(
                Fault(
                    "FullyShardedDataParallel",
                    "its shards are views into flat memory, so they cannot be assigned",
                    fix="load_state_dict(state) copies the values",
                )
            )
        keys = self.module.load_state_dict(state_dict, strict)
        self._is_stale = True
        return keys

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Rejected: a copy would have neither the shards nor the communication.

        Raises:
            PlanError: by copy.deepcopy, copy.copy, pickle and torch.save.
        """
        reject_copy(WRAPPER_NAME)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        reducer = self._reducer
        if self._is_stale:
            reducer.after_optimizer_step()
        if torch.is_grad_enabled():
            # After a forward without gradients, the optimizer may still step.
            self._is_stale = False
            self._check_requires_grad()
            self._check_memory()
            reducer.set_requires_gradient_sync(0, self._requires_gradient_sync)
        args, kwargs = self._cast((args, kwargs))
        self._is_in_forward = True
        try:
            return self.module(*args, **kwargs)
        finally:
            self._is_in_forward = False

    def _check_is_fresh(self, block: nn.Module, args: Any) -> None:
        """Reject a call of the module itself, or of a block, on parameters from before the last
        optimizer step: this module's forward all-gathers the updated ones.
        """
        if self.zero < 3 and self._is_stale and not self._is_in_forward:
            fault = Fault(
                WRAPPER_NAME,
                "the module inside was called, which has the values from before the last step",
                got=type(block).__name__,
                fix="call the wrapped module: net(x), not net.module(x)",
            )
            raise PlanError(fault)

    def _check_requires_grad(self) -> None:
        """Reject parameters that were frozen or unfrozen after wrapping, sharded or unsharded."""
        need = self._trained_when_wrapped
        check_requires_grad(self._shard_of.items(), need, WRAPPER_NAME)
        for group in self._reducer.groups:
            check_requires_grad(group.params.items(), need, WRAPPER_NAME)

    def _check_memory(self) -> None:
        """Reject shards that have got other memory: the module would not see their values."""
        for name, shard in self._shard_of.items():
            if shard.data_ptr() != self._addresses[name]:
                reject_other_memory(name, WRAPPER_NAME)

    def _cast_block_inputs(
        self,
        block: nn.Module,
        args: Any,
        kwargs: Any,
    ) -> Any:
        return self._cast((args, kwargs))

    def _cast(self, inputs: Any) -> Any:
        """The same arguments, floating-point tensors in the compute dtype."""
        dtype = self.compute
        if dtype is None:
            return inputs

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_leaves(inputs, Tensor, cast)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate unsharded gradients locally: the backwards of forwards in here reduce nothing."""
        self._requires_gradient_sync = False
        try:
            yield
        finally:
            self._requires_gradient_sync = True

    def global_mean(self, total: Tensor, count: Tensor | float) -> Tensor:
        """The mean loss over what counts on all ranks, to call `backward()` on; see
        `DistributedDataParallel.global_mean`.

        Args:
            total: sum of this rank's losses, scalar.
            count: of its targets; with several backwards a step, of all of them together.
        """
        return global_mean(self.comm, self.axis, total, count)

    def finish_gradient_synchronization(self) -> None:
        """Wait until every gradient is the mean over the ranks, and take the first rank's buffers.
        Call once, after the last backward of a step.
        """
        check_all_wrapped(self.module, WRAPPER_NAME)
        self._release_gradients()
        reducer = self._reducer
        reducer.start_remaining()
        used = reducer.used_on_any_rank(self.axis)
        reducer.finish()
        is_sharded = self.comm.degree(self.axis) > 1
        for group in reducer.trained_groups:
            for name, gradient in group.take_reduced_grads().items():
                shard = self._shard_of[name]
                if name not in used:
                    continue
                if shard.grad is None:
                    shard.grad = gradient.as_subclass(ShardGradient) if is_sharded else gradient
                else:
                    shard.grad.add_(gradient)
        broadcast_buffers(self.module, self.comm, self.axis)
        self._is_stale = True

    def _hold_gradients(self) -> None:
        """After the first backward since gradients were synchronised: note each shard's gradient,
        which must stay until then; zeroing it would not discard what the backward yielded.
        """
        if self._pending:
            return
        for name, shard in self._shard_of.items():
            if not shard.requires_grad:
                continue
            if shard.grad is None:
                shard.grad = pending_gradient(shard)
            self._pending[name] = (shard.grad, shard.grad._version)

    def _release_gradients(self) -> None:
        """Reject gradients that were zeroed or changed since `_hold_gradients`."""
        pending = self._pending
        self._pending = {}
        for name, (held, version) in pending.items():
            shard = self._shard_of[name]
            if shard.grad is not held or held._version != version:
                reject_unsynchronized_use(f"that of {name} was zeroed or changed")
        for name, (held, _) in pending.items():
            if isinstance(held, PendingGradient):
                self._shard_of[name].grad = None

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns the
        norm before, float64.

        torch.nn.utils.clip_grad_norm_ would take the norm of this rank's entries: it is rejected.
        """
        own_axes = axis_names(self.axis)
        gradients: list[tuple[Tensor, tuple[str, ...]]] = []
        for name, shard in self._shard_of.items():
            if shard.grad is not None:
                axes = (*own_axes, *self._tensor_axes[name])
                gradients.append((shard.grad, axes))
        norm = total_norm(self.comm, gradients)
        clip_to((gradient for gradient, _ in gradients), norm, max_norm)
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict that the module would have unwrapped, on every rank; a collective over all
        ranks.
        """
        values = self._reducer.full_parameters()
        values.update(self.module.named_buffers())
        state: dict[str, Tensor] = {}
        for key, name in self._state_names.items():
            value = values[name].detach()
            state[key] = value.clone()
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's shards from a state dict of the unwrapped module.

        Raises:
            DataError: keys are missing or unknown.
        """
        check_state_keys(state, self._state_names)
        values = {name: state[key] for key, name in self._state_names.items()}
        for group in self._reducer.groups:
            group_values = {name: values[name] for name in group.params}
            group.load(group_values)
        for name, buffer in self.module.named_buffers():
            if name in values:
                buffer.copy_(values[name])
        self._is_stale = True

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> FullyShardedDataParallel:
        """Moves and casts are refused: the shards are views into flat memory."""
        tensors = (*self.parameters(), *self.buffers())
        is_unchanged = all(fn(tensor) is tensor for tensor in tensors)
        if not is_unchanged:
            raise PlanError(
                Fault(
                    "FullyShardedDataParallel",
                    "its module cannot be moved or cast once it is wrapped",
                )
            )
        return self


def _device_of(module: nn.Module) -> torch.device:
    """That of the first parameter with values; the CPU where there is none."""
    for param in module.parameters():
        if not param.is_meta:
            return param.device
    return torch.device("cpu")


def default_blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The children that have parameters; of containers, their children."""
    for child in module.children():
        if isinstance(child, CONTAINERS):
            yield from default_blocks(child)
        elif isinstance(child, UNCALLED):
            continue
        elif next(child.parameters(), None) is not None:
            yield child
