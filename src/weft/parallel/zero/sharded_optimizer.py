"""`ShardedOptimizer`: any torch optimizer with its states sharded over ranks (ZeRO 1), in a plain script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm.comm import Comm, comm_or_world
from weft.core.mesh import Axis
from weft.errors import DataError, Fault, PlanError
from weft.parallel.autograd.holders import holders_of
from weft.parallel.autograd.rank_part import plain
from weft.parallel.dp import AXIS as DP
from weft.parallel.zero.coded_states import NEVER_NEGATIVE, OF_TORCH, CodedStates
from weft.parallel.zero.flat_params import FlatLayout, FlatParams
from weft.parallel.zero.registered_shards import entries_of
from weft.parallel.zero.shard_entries import ShardGroup
from weft.parallel.zero.sharded_functions import sharded_param
from weft.parallel.zero.sharded_tensor import (
    ShardedTensor,
    adopt_group,
    own_entries,
    sharded,
    shards_in,
)
from weft.parallel.zero.wrapped_params import check_initialized

State = dict[str, Any]
"""State that an optimizer keeps for one parameter: tensors of its shape, numbers."""


class ShardedOptimizer(Optimizer):
    """Updates this rank's shard of every parameter, then all-gathers the others'; states are held
    for that shard alone.

        net = weft.DistributedDataParallel(net)
        optimizer = weft.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)
        net(x).sum().backward()
        optimizer.step()

    Gradients must be the same on every rank, as `DistributedDataParallel` leaves them. `param_groups`
    hold the unsharded parameters and the settings: schedulers set "lr" there. Parameters without a
    gradient stay as they are; they may be frozen, unfrozen, added, moved and cast later. The class is
    given shards that have the shape and the norms of the parameters (`ShardedTensor`), of whole layers
    under `weft.parallelize`, so LARS, LAMB, Muon and Adafactor are right, too. `state_dict()` is of this
    rank's shard, `full_state_dict()` of all.

    With `state_bits=8` states of matrices of at least 16 blocks have 8 bits between steps, as in `weft
    train` (docs/optimizers.md): an entry of a state is a byte, and `state_block` entries of a row share
    a scale, the same blocks on any number of ranks. State dicts have the values. Loading one is then a
    collective over all ranks, as a step is. A group may say otherwise, as one of embeddings should:
    `{"params": net.embed.parameters(), "state_bits": None}`.

    Args:
        params: as a torch optimizer takes them: parameters, (name, parameter) pairs, or groups of
            either.
        optimizer: the class, for example torch.optim.AdamW.
        comm: communication with the other ranks; None: the world of torch.distributed is the data
            axis.
        axis: the mesh axis (or axes) over which states are sharded.
        state_bits: 8, or None: states have the type of the parameters.
        state_block: entries of a row that share the scale of their 8 bits.
        kwargs: for the class.

    Raises:
        PlanError: the parameters are shards of FullyShardedDataParallel, or other bits are asked for.

    Source: Rajbhandari et al. 2020, ZeRO.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Callable[..., Optimizer],
        comm: Comm | None = None,
        *,
        axis: Axis = DP,
        state_bits: Literal[8] | None = None,
        state_block: int = 256,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, kwargs)
        numbered = ((f"parameter {n}", each) for n, each in enumerate(self._all_params()))
        check_initialized(numbered, "ShardedOptimizer")
        _check_not_sharded(self._all_params())
        first: Tensor = self.param_groups[0]["params"][0]
        self.comm = comm_or_world(comm, axis=axis, device=first.device)
        self.axis = axis
        self._flat_groups: list[_FlatGroup] = []
        self._state_bits = state_bits
        block = _checked_block(state_block)
        inner_groups = [self._inner_group(param_group) for param_group in self.param_groups]
        self.inner = optimizer(inner_groups, **kwargs)
        unsigned = (
            NEVER_NEGATIVE if type(self.inner).__module__.startswith(OF_TORCH) else frozenset()
        )
        self._coded = CodedStates(ShardGroup(self.comm, axis), block, never_negative=unsigned)
        self.defaults = dict(self.inner.defaults)
        self._copy_settings_from_inner()

    def _inner_group(self, param_group: Mapping[str, Any]) -> dict[str, Any]:
        """A group of the optimizer of this rank's shards."""
        bits = _checked_bits(param_group.get("state_bits", self._state_bits))
        flat_groups = self._flatten(param_group["params"], has_8_bits=bits == 8)
        self._flat_groups += flat_groups
        shards = [shard for flat_group in flat_groups for shard in flat_group.shards]
        return {**_settings(param_group), "params": shards}

    def _flatten(self, params: Sequence[nn.Parameter], *, has_8_bits: bool) -> list[_FlatGroup]:
        """The parameters of a group in flat memory: runs of the same dtype and device, trained or
        frozen.
        """
        runs: list[list[nn.Parameter]] = []
        for param in params:
            if runs and _are_alike(runs[-1][0], param):
                runs[-1].append(param)
            else:
                runs.append([param])
        group = ShardGroup(self.comm, self.axis)
        return [_FlatGroup(run, group, has_8_bits=has_8_bits) for run in runs]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch's optimizers do; every rank adds the same."""
        super().add_param_group(param_group)
        if hasattr(self, "inner"):
            added = self.param_groups[-1]
            _check_not_sharded(added["params"])
            self.inner.add_param_group(self._inner_group(added))
            self._copy_settings_from_inner()

    def _copy_settings_from_inner(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_settings(inner))

    def _copy_settings_to_inner(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_settings(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; a collective over all ranks. `closure` computes gradients, once or as often as
        the optimizer calls it (LBFGS); returns what the optimizer returns.
        """
        self._copy_settings_to_inner()
        for flat_group in self._flat_groups:
            flat_group.follow_memory()
        self._coded.decode(self.inner.state)
        if closure is None:
            self._set_shard_grads()
            loss = self.inner.step()
        else:
            loss = self.inner.step(partial(self._evaluate, closure))
        self._encode_states()
        self._gather_updated()
        for flat_group in self._flat_groups:
            flat_group.clear_shard_grads()
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Have the gradients of the parameters as they are now."""
        self._gather_updated()
        with torch.enable_grad():
            loss = closure()
        self._set_shard_grads()
        return loss

    def _set_shard_grads(self) -> None:
        for flat_group in self._flat_groups:
            flat_group.set_shard_grads()

    def _gather_updated(self) -> None:
        """All-gather what this step has updated."""
        updated = [each for each in self._flat_groups if each.has_updates]
        # All start before the first is waited for.
        works = [
            self.comm.start_all_gather_(flat_group.params_memory.alias(), self.axis)
            for flat_group in updated
        ]
        for work in works:
            work.wait()

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shard: it can be loaded on the same number of ranks alone."""
        self._copy_settings_to_inner()
        with self._coded.decoded(self.inner.state):
            found = self.inner.state_dict()
            return {**found, "state": {key: {**value} for key, value in found["state"].items()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank."""
        with self.replaced_states():
            self.inner.load_state_dict(state_dict)
            for shard, state in self.inner.state.items():
                adopt_group(shards_in((shard, state)))
        self._copy_settings_from_inner()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the plain optimizer over unsharded parameters, on every rank; a
        collective over all ranks.
        """
        state_of: dict[int, State] = {}
        with self._coded.decoded(self.inner.state):
            for flat_group in self._flat_groups:
                state_of.update(flat_group.gather_states(self.inner.state))
        states: dict[int, State] = {}
        for number, param in enumerate(self._all_params()):
            state = state_of.get(id(param))
            if state:
                states[number] = state
        found = super().state_dict()
        found["state"] = states
        return found

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's shard of a state dict of the plain optimizer over unsharded parameters.

        Raises:
            DataError: it has another number of parameters.
        """
        params = self._all_params()
        groups = state_dict["param_groups"]
        num_given = sum(len(group["params"]) for group in groups)
        if num_given != len(params):
            fault = Fault(
                "state",
                "has another number of parameters",
                got=str(num_given),
                need=str(len(params)),
            )
            raise DataError(fault)
        given = state_dict["state"]
        states: dict[int, State] = {}
        for number, param in enumerate(params):
            states[id(param)] = given.get(number, {})
        with self.replaced_states():
            self.inner.state.clear()
            for flat_group in self._flat_groups:
                self.inner.state.update(flat_group.shard_states(states))
        for own_group, loaded_group in zip(self.param_groups, groups, strict=True):
            own_group.update(_settings(loaded_group))

    @contextmanager
    def replaced_states(self) -> Iterator[None]:
        """Inside the block the states of all shards are replaced by loaded values; with `state_bits=8` its
        end is a collective over all ranks.
        """
        self._coded.clear()  # or the next step would decode them over what is loaded
        yield
        self._encode_states()

    def shard_of(self, param: Tensor) -> Tensor:
        """The shard that is updated for a parameter."""
        for flat_group in self._flat_groups:
            for each, shard in zip(flat_group.params, flat_group.shards, strict=True):
                if each is param:
                    return shard
        raise KeyError(param)

    def shard_state(self, param: Tensor) -> State:
        """The state of this rank's shard of a parameter; empty before the first step."""
        shard = self.shard_of(param)
        return {**self.inner.state.get(shard, {}), **self._coded.of_shard(shard)}

    def _encode_states(self) -> None:
        """States that have 8 bits between steps get them."""
        flat_groups = [each for each in self._flat_groups if each.has_8_bits]
        shards = [shard for flat_group in flat_groups for shard in flat_group.shards]
        self._coded.encode(self.inner.state, shards)

    def _all_params(self) -> list[nn.Parameter]:
        found: list[nn.Parameter] = []
        for group in self.param_groups:
            found.extend(group["params"])
        return found


class _FlatGroup:
    """Parameters of one group and dtype in flat memory, of which this rank's optimizer updates a
    shard.

    Attributes:
        params: unsharded, views into `params_memory`.
        shards: this rank's entries of each, perhaps none, views into the same memory.
        has_8_bits: whether their states have 8 bits between steps.
    """

    def __init__(self, params: list[nn.Parameter], group: ShardGroup, *, has_8_bits: bool) -> None:
        self.params = params
        self.has_8_bits = has_8_bits
        self._index = group.comm.index(group.axis)
        self.layout = FlatLayout.of(
            {str(number): tuple(param.shape) for number, param in enumerate(params)},
            group.comm.degree(group.axis),
        )
        self.shards: list[nn.Parameter] = []
        for param, (name, view) in zip(params, self._flatten().items(), strict=True):
            entries, holders = entries_of(self.layout, name, self._index), holders_of(param)
            if holders is not None:
                entries = replace(entries, of_layer=holders.whole_shape(entries.shape))
            shard_group = replace(group, holders=holders)
            self.shards.append(sharded_param(view, entries, shard_group))

    def _flatten(self) -> dict[str, Tensor]:
        """Move the parameters into flat memory; returns this rank's entries of each."""
        named = {str(number): param for number, param in enumerate(self.params)}
        self.params_memory = FlatParams(named, self.layout, dtype=self.params[0].dtype)
        own_entries = self.params_memory.flat[self.layout.shard_slice(self._index)]
        return self.layout.shard_views(own_entries, self._index)

    def follow_memory(self) -> None:
        """Move parameters into flat memory again that scripts have moved, cast or given other memory."""
        start = self.params_memory.flat.data_ptr()
        for param, span in zip(self.params, self.layout.spans, strict=True):
            is_view = param.data_ptr() == start + span.start * param.element_size()
            if param.numel() > 0 and not is_view:
                break
        else:
            return
        for shard, view in zip(self.shards, self._flatten().values(), strict=True):
            shard.data = sharded(shard).with_local(view)

    @property
    def has_updates(self) -> bool:
        """Whether the optimizer has had gradients of these parameters in this step."""
        return any(shard.grad is not None for shard in self.shards)

    def set_shard_grads(self) -> None:
        """Set each shard's gradient to a view of its entries of the parameter's gradient."""
        for param, shard in zip(self.params, map(sharded, self.shards), strict=True):
            if param.grad is None:
                shard.grad = None
                continue
            # A view of a contiguous gradient: what the optimizer changes in it, it changes in the parameter's.
            own_entries = plain(param.grad).reshape(-1)[shard.entries.own]
            shard.grad = shard.with_local(own_entries)

    def clear_shard_grads(self) -> None:
        """Drop the references to the views."""
        for shard in self.shards:
            shard.grad = None

    def gather_states(self, state: Mapping[Tensor, State]) -> dict[int, State]:
        """The state of each unsharded parameter, by its id; sharded values are all-gathered."""
        return {
            id(param): {
                key: value.full_tensor() if isinstance(value, ShardedTensor) else _copy(value)
                for key, value in state.get(shard, {}).items()
            }
            for param, shard in zip(self.params, self.shards, strict=True)
        }

    def shard_states(self, states: Mapping[int, State]) -> dict[Tensor, State]:
        """The state of each shard, from the states of unsharded parameters by id: this rank's entries of
        tensors of the parameter's shape.
        """
        found: dict[Tensor, State] = {}
        for param, shard in zip(self.params, self.shards, strict=True):
            state = {
                key: _copy(value) if key == "step" else _own_part(value, sharded(shard))
                for key, value in states[id(param)].items()
            }
            if state:
                found[shard] = state
        return found


@contextmanager
def replaced_states(optimizer: Optimizer) -> Iterator[MutableMapping[Tensor, State]]:
    """The states of any optimizer, of a `ShardedOptimizer` those of its shards, which are replaced inside
    the block; see `ShardedOptimizer.replaced_states`.
    """
    if isinstance(optimizer, ShardedOptimizer):
        with optimizer.replaced_states():
            yield optimizer.inner.state
    else:
        yield optimizer.state


def _own_part(value: Any, shard: ShardedTensor) -> Any:
    """This rank's entries of a state value of the parameter's shape; others as they are."""
    if not isinstance(value, Tensor) or value.shape != shard.shape:
        return _copy(value)
    return shard.with_local(own_entries(value, shard).to(shard.device, copy=True))


def _check_not_sharded(params: Iterable[Tensor]) -> None:
    """Raise PlanError for shards: their states are sharded already."""
    if any(isinstance(param, ShardedTensor) for param in params):
        fault = Fault(
            "ShardedOptimizer",
            "these parameters are shards of FullyShardedDataParallel, which shards the states, too",
            need="whole parameters",
            fix="the plain optimizer, such as torch.optim.AdamW(net.parameters())",
        )
        raise PlanError(fault)


def _checked_bits(bits: object) -> object:
    """The bits of a group's states, if they can be chosen."""
    if bits in (None, 8):
        return bits
    what = "states have 8 bits or the type of the parameters"
    raise PlanError(Fault("state_bits", what, got=str(bits), need="8 or None"))


def _checked_block(length: int) -> int:
    if length >= 2:
        return length
    what = "entries share a scale"
    raise PlanError(Fault("state_block", what, got=str(length), need="2 or more"))


def _are_alike(one: Tensor, other: Tensor) -> bool:
    has_same_dtype = one.dtype == other.dtype
    has_same_device = one.device == other.device
    return has_same_dtype and has_same_device


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return value


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a parameter group, without its parameters."""
    settings = dict(group)
    del settings["params"]
    settings.pop("param_names", None)
    return settings
