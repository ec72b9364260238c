"""`FullyShardedDataParallel`: parameters, gradients and optimizer states of any module sharded over ranks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.comm.comm import Comm, comm_or_world
from weft.core.mesh import Axis, axis_names
from weft.errors import Fault, PlanError
from weft.parallel.autograd.clipping import clip_to, total_norm
from weft.parallel.autograd.holders import holders_of
from weft.parallel.autograd.not_compiled import not_compiled
from weft.parallel.autograd.tree import map_leaves
from weft.parallel.dp import AXIS as DP
from weft.parallel.zero.backward_order import register_backward_order
from weft.parallel.zero.gradient_reducer import GradientReducer
from weft.parallel.zero.meta_init import init_block, own_params
from weft.parallel.zero.param_group import ParamGroup
from weft.parallel.zero.registered_shards import (
    WRAPPER_NAME,
    make_shards,
    move_values,
    register_shards,
)
from weft.parallel.zero.registered_values import RegisteredValues
from weft.parallel.zero.shard_entries import ShardGroup
from weft.parallel.zero.shard_gradients import add_gradient, call_gradient_hooks
from weft.parallel.zero.sharded_tensor import local_of, sharded
from weft.parallel.zero.sharding_policy import WrapperSharding
from weft.parallel.zero.synchronized import SynchronizedModule
from weft.parallel.zero.unshard_hooks import BlockGroups, groups_of, register_unshard_hooks
from weft.parallel.zero.wrapped_params import (
    check_all_wrapped,
    check_not_wrapped,
    check_state,
    mark_wrapped,
    reject_pickle,
)

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Modules whose children are blocks."""
UNCALLED = (nn.ParameterList, nn.ParameterDict)
"""Modules without a forward: their parameters belong to the module that has them."""


class FullyShardedDataParallel(SynchronizedModule):
    """A module that each rank holds a shard of; a block's parameters are all-gathered while it
    runs, gradients are averaged.

        net = weft.FullyShardedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        net(x).sum().backward()                     # .grad is the mean over the ranks
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()

    Starts from the first rank's parameters and buffers, and has the first rank's buffers after each
    synchronised backward, as `DistributedDataParallel`. `named_parameters()` has the module's own
    names; a parameter there is a `ShardedTensor`: it has the shape, norms and values of the whole
    one, and the memory of this rank's entries. Any optimizer updates it, made before or after
    wrapping: one that updates each entry by itself (SGD, Adam and their like) communicates nothing;
    LARS and LAMB all-reduce norms; Muon and other optimizers of whole matrices gather what they read.
    Attributes that the wrapper does not have are those of the module.
    Inside the forward of its block `module.weight` is the unsharded parameter, also by the module's
    `named_parameters()` and `torch.func.functional_call`; under `zero=3` it is NaN elsewhere. Those of
    the wrapper are shards everywhere. Several backwards a step add up, also under `no_sync()`, and
    gradients may be zeroed or discarded at any place. Frozen, unused and tied parameters and uneven shapes are allowed;
    parameters may be frozen, unfrozen, moved and cast later. A parameter that no rank has used since
    the last step keeps the `.grad` it had: None at first and after `zero_grad()`, zeros after
    `zero_grad(set_to_none=False)` of a gradient, as in one process.

    Every rank runs the same blocks in the same order, since each is all-gathered by all ranks: a
    block that only some ranks run is a MismatchError, which names the collectives and the
    parameters that were being gathered. Run it on the other ranks too, with a result of weight 0,
    or let ranks differ within a block.
    `state_dict()` has this rank's shards, `full_state_dict()` the unsharded values, and
    `full_optim_state_dict(optimizer)` those of an optimizer; `load_state_dict` takes shards and
    unsharded values. `copy.deepcopy` copies the shards, in a wrapper of their own over the same ranks.

    Args:
        module: any module. One on the meta device gets its values block by block, by
            `reset_parameters` of the modules that own parameters, which has to set all of their
            parameters and buffers: no rank ever holds it unsharded.
        comm: communication with the other ranks; None: the world of torch.distributed is the data
            axis.
        axis: the mesh axis (or axes) over which parameters are sharded; batches differ along it.
        replicate: further axes over which batches differ, along which shards are copies: sharding
            inside a node, replicas across nodes (HSDP). Gradients are reduce-scattered over `axis`,
            then all-reduced over `replicate`.
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
        PlanError: a parameter belongs to a wrapped module already, has hooks or is in use by a graph, or
            is added after wrapping; an optimizer has stepped on gradients of this rank alone; a module
            on the meta device leaves a tensor unset.

    Source: Zhao et al. 2023, PyTorch FSDP; Rajbhandari et al. 2020, ZeRO.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        *,
        axis: Axis = DP,
        replicate: Axis = (),
        zero: Literal[1, 2, 3] = 3,
        blocks: Iterable[nn.Module] | None = None,
        compute: torch.dtype | None = None,
        reduce: torch.dtype | None = None,
    ) -> None:
        check_not_wrapped(module, WRAPPER_NAME)
        comm = comm_or_world(comm, axis=axis, device=_device_of(module))
        chosen = tuple(default_blocks(module) if blocks is None else blocks)
        how = WrapperSharding(axis, axis_names(replicate), zero, compute=compute, reduce=reduce)
        self._wrap(module, comm, how, blocks=chosen)

    def _wrap(
        self,
        module: nn.Module,
        comm: Comm,
        how: WrapperSharding,
        *,
        blocks: tuple[nn.Module, ...],
        is_copy: bool = False,
    ) -> None:
        """Shard the module.

        Args:
            is_copy: whether the values are set later, from a wrapper that is copied.
        """
        super().__init__(module, comm, axis=how.data_axes)
        self.sharding = how
        self.zero = how.zero
        self._blocks = blocks
        chain = (*blocks, module)  # the module comes last, with the parameters of no block
        originals = move_values(module)
        self._name_of = {id(param): name for name, param in module.named_parameters()}
        self._holders = {name: holders_of(p) for name, p in module.named_parameters()}
        self._state_names = self._names_by_state_key()
        params_of_block = [own_params(block, chain) for block in chain]
        self._groups = self._make_groups(chain, is_copy=is_copy)
        uses = [
            BlockGroups(block, groups_of(params, self._groups))
            for block, params in zip(chain, params_of_block, strict=True)
        ]
        self._reducer = GradientReducer(self._groups, comm)
        self._reducer.call_after_backward(weakref.WeakMethod(self._after_reductions))
        *block_uses, module_use = uses
        self._hooks: list[RemovableHandle] = [
            *register_backward_order(self._reducer, 0, blocks),
            *register_unshard_hooks([block_uses, [module_use]]),
        ]
        for block in blocks:
            hook = block.register_forward_pre_hook(self._cast_block_inputs, with_kwargs=True)
            self._hooks.append(hook)
        for block in chain:
            self._hooks.append(block.register_forward_pre_hook(self._refresh))
        self._shard_of = make_shards(
            self._groups, ShardGroup(comm, how.axis), originals=originals, holders=self._holders
        )
        shard_of_param = {key: self._shard_of[name] for key, name in self._name_of.items()}
        self._values = RegisteredValues(chain, shard_of_param)
        self._hooks += self._values.register_hooks(chain)
        register_shards(module, shard_of_param)
        mark_wrapped(module.parameters(), self)
        for group in self._groups:
            mark_wrapped(group.params.values(), self)  # registered while their block runs
        self._is_stale = False
        self._is_in_forward = False
        self._held: dict[str, HeldGradient] = {}
        self._refreshed: dict[str, WrappedParamState] = {}
        self._note_shards()

    def __getattr__(self, name: str) -> Any:
        """What the wrapper does not have is the module's: `net.config`, `net.layers`, as under FSDP2."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is None:
                raise
            return getattr(module, name)

    def _names_by_state_key(self) -> dict[str, str]:
        """Key of the module's state dict -> name of the parameter or buffer; those that modules share have
        several keys.
        """
        state = self.module.state_dict(keep_vars=True)
        name_of = {id(buffer): name for name, buffer in self.module.named_buffers()}
        name_of.update(self._name_of)
        return {
            key: name_of.get(id(value), key)
            for key, value in state.items()
            if isinstance(value, Tensor)
        }

    def _make_groups(self, chain: tuple[nn.Module, ...], *, is_copy: bool) -> list[ParamGroup]:
        """Groups of what each block uses and no block before it does, alike in dtype and in having
        gradients.

        The groups of the module itself come first: its parameters may be used anywhere, so they are
        reduced last.
        """
        grouped: set[int] = set()
        groups: list[ParamGroup] = []
        root_groups: list[ParamGroup] = []
        for block in chain:
            if not is_copy:
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
        how = self.sharding
        alike: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for param in params:
            kind = (param.dtype, param.requires_grad)
            members = alike.setdefault(kind, {})
            members[self._name_of[id(param)]] = param
        for (dtype, _), members in alike.items():
            yield ParamGroup(
                members,
                self.comm,
                how.policy(dtype, num_parts=self.comm.degree(self.axis)),
                axes=self._axes_of_ranks(axis_names(how.axis)),
                replicate_axes=self._axes_of_ranks(how.replicate),
            )

    def _axes_of_ranks(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        return axes if axes and self.comm.degree(axes) > 1 else ()

    @property
    def _gradient_reducer(self) -> GradientReducer:
        return self._reducer

    def _updated_params(self) -> Mapping[str, Tensor]:
        return self._shard_of

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's shards under the names that the module's parameters had unwrapped."""
        with self._values.hidden():
            return iter(list(self.module.named_parameters(prefix, recurse, remove_duplicate)))

    def _named_params(self) -> Iterator[tuple[str, Tensor]]:
        return self.named_parameters()

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The buffers under the names that they had unwrapped."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(  # type: ignore[override]
        self, *args: Any, prefix: str = "", **kwargs: Any
    ) -> dict[str, Any]:
        """This rank's shards, and the buffers, under the names of `named_parameters()`.

        As a part of another module's state dict the keys have `module.`, as that module's
        `named_parameters()` do.

        Raises:
            PlanError: a parameter was written while its memory is freed.
        """
        for group in self._groups:
            group.check_unwritten()
        state: dict[str, Any]
        with self._values.hidden():
            if args or prefix:
                state = super().state_dict(*args, prefix=prefix, **kwargs)
            else:
                state = self.module.state_dict(**kwargs)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what `state_dict` returned on this rank, or unsharded values, of which this rank keeps
        its entries.

        Raises:
            PlanError: `assign`, since the shards are views into flat memory; shards of another rank,
                or of another number of ranks.
        """
        if assign:
            raise PlanError(
                Fault(
                    "FullyShardedDataParallel",
                    "its shards are views into flat memory, so they cannot be assigned",
                    fix="load_state_dict(state) copies the values",
                )
            )
        with self._values.hidden():
            keys = self.module.load_state_dict(state_dict, strict)
        self._is_stale = True
        return keys

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        for group in self._groups:
            for name, param in group.params.items():
                shard = self._shard_of[name]
                # a placeholder of the whole shape, of one entry's memory: the values follow below
                entry = torch.zeros((), dtype=shard.dtype, device=shard.device)
                whole = nn.Parameter(entry.expand(shard.shape), requires_grad=shard.requires_grad)
                memo[id(shard)] = memo[id(param)] = whole
        with self._values.hidden():
            module, blocks = self._copy_without_hooks(memo)
        copied._wrap(module, self.comm, self.sharding, blocks=blocks, is_copy=True)
        with torch.no_grad():
            for name, shard in self._shard_of.items():
                copied._shard_of[name].copy_(shard)
        copied._is_stale = True
        return copied

    def _copy_without_hooks(self, memo: dict[int, Any]) -> tuple[nn.Module, tuple[nn.Module, ...]]:
        """A deep copy of the module and its blocks, with the hooks of scripts and without those of this
        wrapper.
        """
        own = {hook.id for hook in self._hooks}
        found = {
            id(each): each for hook in self._hooks if (each := hook.hooks_dict_ref()) is not None
        }
        before = [(hooks, dict(hooks)) for hooks in found.values()]
        for hooks, _ in before:
            for key in own & hooks.keys():
                del hooks[key]
        try:
            return copy.deepcopy((self.module, self._blocks), memo)
        finally:
            for hooks, all_hooks in before:
                hooks.clear()
                hooks.update(all_hooks)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Rejected: a file has no communication.

        Raises:
            PlanError: by pickle and torch.save.
        """
        reject_pickle(WRAPPER_NAME)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        args, kwargs = self._before_module(args, kwargs)
        try:
            outputs = self.module(*args, **kwargs)
        except BaseException:
            self._values.interrupt_forward()
            raise
        finally:
            self._is_in_forward = False
        self._after_module(outputs)
        return outputs

    @not_compiled
    def _before_module(self, args: Any, kwargs: Any) -> Any:
        """Have the values that scripts have set; returns the arguments as the module takes them."""
        self._follow_shards()
        if self._is_stale:
            self._reducer.after_optimizer_step()
            self._note_shards()
        if torch.is_grad_enabled():
            # After a forward without gradients, the optimizer may still step.
            self._is_stale = False
            self._before_forward()
        self._is_in_forward = True
        self._values.begin_forward()
        return self._cast((args, kwargs))

    def _begin_backward(self, must_sync: bool) -> None:
        self._values.begin_backward()
        super()._begin_backward(must_sync)

    @not_compiled
    def _after_module(self, outputs: Any) -> None:
        is_seen = torch.is_grad_enabled() and self._after_forward(outputs)
        self._values.end_forward(is_seen=is_seen)

    def _note_shards(self) -> None:
        """Note the memory and the versions of the shards that blocks have the values of."""
        self._noted = self._states()

    def _states(self) -> dict[str, WrappedParamState]:
        with torch._C.DisableTorchFunctionSubclass():  # reads of memory and counters, many of them
            return {
                name: _state_of(param, self._shard_of[name])
                for group in self._groups
                for name, param in group.params.items()
            }

    def _follow_shards(self) -> None:
        """Have blocks compute with what scripts have made of the shards: frozen and unfrozen ones, moved and
        cast ones, changed values. Every rank has made the same changes.
        """
        self._values.hide_after_error()
        check_all_wrapped(self.module, self)
        found = self._states()
        if found == self._noted:
            return
        for group in self._groups:
            if any(found[name].memory != self._noted[name].memory for name in group.params):
                self._replace_memory(group)
        is_changed = False
        for group in self._groups:
            for name, param in group.params.items():
                shard = self._shard_of[name]
                before = self._noted[name]
                if found[name].unsharded_version != before.unsharded_version and self.zero < 3:
                    shard.detach().copy_(param.detach())  # by way of module.weight
                if param.requires_grad != shard.requires_grad:
                    is_changed = True
                    is_trained = not before.requires_grad  # whichever of the two was changed
                    param.requires_grad_(is_trained)
                    shard.requires_grad_(is_trained)
        if is_changed:
            self._reducer.follow_requires_grad()
        self._is_stale = True

    def _note_changes(self) -> None:
        """Have the groups hold what scripts have set, before the groups are read or written outside of a
        forward: memory that a shard has got since the last one is not theirs.
        """
        self._follow_shards()
        # Noted at once: the next forward would take what is loaded in between for a script's change.
        self._note_shards()

    @torch.no_grad()
    def _replace_memory(self, group: ParamGroup) -> None:
        """Put the shards of a group, which have got memory of their own, into flat memory again."""
        shards = {name: self._shard_of[name] for name in group.params}
        dtypes = {shard.dtype for shard in shards.values()}
        if len(dtypes) > 1:
            fault = Fault(
                WRAPPER_NAME,
                f"parameters that are gathered together have got several dtypes: {', '.join(shards)}",
                got=", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)),
                need="one",
                fix="cast the wrapped module, or cast before wrapping",
            )
            raise PlanError(fault)
        (dtype,) = dtypes
        policy = self.sharding.policy(dtype, num_parts=self.comm.degree(self.axis))
        local = {name: local_of(shard) for name, shard in shards.items()}
        for name, view in group.replace_shard(local, policy).items():
            shards[name].data = sharded(shards[name]).with_local(view)

    @not_compiled
    def _refresh(self, block: nn.Module, args: Any) -> None:
        """All-gather the updated parameters where a script calls the module itself, or a block, without
        gradients (`net.generate()`), as all ranks then do. With gradients it is rejected: they would
        not be synchronised.
        """
        if self.zero == 3 or not self._is_stale or self._is_in_forward:
            return
        if torch.is_grad_enabled():
            fault = Fault(
                WRAPPER_NAME,
                "the module inside was called, which has the values from before the last step",
                got=type(block).__name__,
                fix="call the wrapped module: net(x), not net.module(x)",
            )
            raise PlanError(fault)
        if self._refreshed is self._noted and self._states() == self._noted:
            return  # by the hook of the module, for all its blocks
        self._follow_shards()
        self._reducer.after_optimizer_step()
        self._note_shards()
        self._refreshed = self._noted

    @not_compiled
    def _cast_block_inputs(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cast((args, kwargs))

    def _cast(self, inputs: Any) -> Any:
        """The same arguments, floating-point tensors in the compute dtype."""
        dtype = self.sharding.compute
        if dtype is None:
            return inputs

        def cast(tensor: Tensor) -> Tensor:
            return tensor.to(dtype) if tensor.is_floating_point() else tensor

        return map_leaves(inputs, Tensor, cast)

    def _hold_gradients(self) -> None:
        """Put zeros in the place of gradients that are None, so that a script that zeroes them is seen: what
        `no_sync()` has accumulated is unsharded, and in no `.grad`.
        """
        for name in self._reducer.arrived - self._held.keys():
            shard = self._shard_of[name]
            is_new = shard.grad is None
            if is_new:
                shard.grad = sharded(shard).with_local(torch.zeros_like(local_of(shard.detach())))
            assert shard.grad is not None, "set above"
            self._held[name] = HeldGradient(shard.grad, shard.grad._version, is_new=is_new)

    def _follow_discards(self) -> None:
        for name, held in tuple(self._held.items()):
            gradient = self._shard_of[name].grad
            if gradient is held.gradient and gradient._version == held.version:
                continue
            if gradient is not None and (
                gradient is not held.gradient or bool(local_of(gradient).any())
            ):
                fault = Fault(
                    WRAPPER_NAME,
                    f"the gradient of {name} was changed while those under no_sync() were not synchronised yet",
                    fix="zero_grad() discards them; change gradients after the last backward of a step",
                )
                raise PlanError(fault)
            del self._held[name]
            self._reducer.arrived.discard(name)
            for group in self._groups:
                if name in group.params:
                    group.discard_grad(name)

    def _release_gradients(self) -> None:
        """Take back the zeros of `_hold_gradients`."""
        self._follow_discards()
        for name, held in self._held.items():
            if held.is_new:
                self._shard_of[name].grad = None
        self._held.clear()

    def _synchronize(self) -> None:
        self._release_gradients()
        reducer = self._reducer
        reducer.start_remaining()
        used = reducer.used_on_any_rank(self.axis)
        reducer.finish()
        synchronised: list[nn.Parameter] = []
        for group in reducer.trained_groups:
            for name, gradient in group.take_reduced_grads().items():
                if name in used:
                    add_gradient(self._shard_of[name], gradient)
                    synchronised.append(self._shard_of[name])
        self._broadcast_buffers(self.module, self.comm, self.axis)
        self._is_stale = True
        for shard in synchronised:
            call_gradient_hooks(shard)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients so that their norm over all ranks is at most `max_norm`; returns the
        norm before, float64.

        torch.nn.utils.clip_grad_norm_ does the same with an all-reduce for each parameter.
        """
        gradients: list[tuple[Tensor, tuple[str, ...]]] = []
        for name, shard in self._shard_of.items():
            if shard.grad is not None:
                group = ShardGroup(self.comm, self.sharding.axis, self._holders[name])
                gradients.append((local_of(shard.grad), group.all_axes))
        norm = total_norm(self.comm, gradients)
        clip_to((gradient for gradient, _ in gradients), norm, max_norm)
        return norm

    def full_state_dict(self) -> dict[str, Tensor]:
        """The state dict that the module would have unwrapped, on every rank; a collective over all
        ranks.
        """
        self._note_changes()
        values = self._reducer.full_parameters()
        values.update(self.module.named_buffers())
        return {key: values[name].detach().clone() for key, name in self._state_names.items()}

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load this rank's shards from a state dict of the unwrapped module.

        Raises:
            DataError: keys are missing or unknown, or a tensor has another shape.
        """
        self._note_changes()
        tensors: dict[str, Tensor] = {**dict(self.module.named_buffers()), **self._shard_of}
        check_state(
            state,
            {
                key: tensors[name].shape
                for key, name in self._state_names.items()
                if name in tensors
            },
        )
        values = {name: state[key] for key, name in self._state_names.items()}
        for group in self._groups:
            group.load({name: values[name] for name in group.params})
        for name, buffer in self.module.named_buffers():
            if name in values:
                buffer.copy_(values[name])
        self._is_stale = True


class HeldGradient(NamedTuple):
    """A shard's gradient as it was after a backward that was not synchronised.

    Attributes:
        is_new: whether it was None, and zeros are in its place.
    """

    gradient: Tensor
    version: int
    is_new: bool


class WrappedParamState(NamedTuple):
    """What scripts may change of a parameter.

    Attributes:
        memory: storage, address and dtype of the shard.
        requires_grad: of the shard; and of the unsharded parameter, which scripts reach as
            `module.weight`.
        version: of the shard's values.
        unsharded_version: of the unsharded values.
    """

    memory: tuple[int, int, torch.dtype]
    requires_grad: bool
    unsharded_requires_grad: bool
    version: int
    unsharded_version: int


def _state_of(param: nn.Parameter, shard: nn.Parameter) -> WrappedParamState:
    return WrappedParamState(
        # the storage, too: a shard without entries has no address, and all ranks have to see a replacement
        (shard.untyped_storage()._cdata, shard.data_ptr(), shard.dtype),
        shard.requires_grad,
        param.requires_grad,
        shard._version,
        param._version,
    )


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
