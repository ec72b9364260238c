"""`ShardedOptimizer`: any torch optimizer with its states sharded over ranks (ZeRO 1), in a plain script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm.comm import Comm
from weft.comm.default_comm import comm_or_world
from weft.comm.transport import Work
from weft.core.mesh import Axis
from weft.errors import DataError, Fault, PlanError
from weft.parallel.dp import AXIS as DP
from weft.parallel.zero.elementwise import elementwise_state_keys
from weft.parallel.zero.flat_params import FlatLayout, FlatParams
from weft.parallel.zero.wrapped_params import check_not_sharded, reject_other_memory

State = dict[str, Any]
"""State that an optimizer keeps for one parameter: tensors of its shape, numbers."""


class ShardedOptimizer(Optimizer):
    """Updates this rank's shard of every parameter, then all-gathers the others'; states are held
    for that shard alone.

        net = weft.DistributedDataParallel(net)
        optimizer = weft.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)
        net(x).sum().backward()
        net.finish_gradient_synchronization()      # gradients must be the same on every rank
        optimizer.step()

    `param_groups` hold the unsharded parameters and the settings: schedulers set "lr" there. Frozen
    parameters and those without a gradient stay as they are. `state_dict()` is of this rank's
    shard, `full_state_dict()` of all.

    Args:
        params: as a torch optimizer takes them: parameters, (name, parameter) pairs, or groups of
            either.
        optimizer: the class, for example torch.optim.AdamW; it must update every entry of a
            parameter by itself.
        comm: communication with the other ranks; None: the world of torch.distributed is the data
            axis.
        axis: the mesh axis (or axes) over which states are sharded.
        kwargs: for the class.

    Raises:
        PlanError: the class updates an entry by what the others of its parameter are (LBFGS, Muon,
            Adafactor), or the parameters are shards of FullyShardedDataParallel; parameters are
            added, unfrozen, moved or cast later.

    Source: Rajbhandari et al. 2020, ZeRO.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Callable[..., Optimizer],
        comm: Comm | None = None,
        *,
        axis: Axis = DP,
        **kwargs: Any,
    ) -> None:
        super().__init__(params, kwargs)
        check_not_sharded(self._all_params(), "ShardedOptimizer")
        first: Tensor = self.param_groups[0]["params"][0]

        def make(tensors: list[nn.Parameter]) -> Optimizer:
            return optimizer(tensors, **kwargs)

        self._elementwise_keys = elementwise_state_keys(make, device=first.device)
        self.comm = comm_or_world(comm, axis=axis, device=first.device)
        self.axis = axis
        self._flat_groups: list[_FlatGroup] = []
        inner_groups: list[dict[str, Any]] = []
        for param_group in self.param_groups:
            shards: list[nn.Parameter] = []
            for flat_group in self._flatten(param_group["params"]):
                self._flat_groups.append(flat_group)
                shards.extend(flat_group.shards)
            inner_group = _settings(param_group)
            inner_group["params"] = shards
            inner_groups.append(inner_group)
        self.inner = optimizer(inner_groups, **kwargs)
        self.defaults = dict(self.inner.defaults)
        self._frozen = [param for param in self._all_params() if not param.requires_grad]
        self._copy_settings_from_inner()

    def _flatten(self, params: Sequence[nn.Parameter]) -> list[_FlatGroup]:
        """The trained parameters of a group in flat memory: runs of the same dtype and device."""
        runs: list[list[nn.Parameter]] = []
        for param in params:
            if not param.requires_grad:
                continue
            if runs and _are_alike(runs[-1][0], param):
                runs[-1].append(param)
            else:
                runs.append([param])
        flat_groups: list[_FlatGroup] = []
        for run in runs:
            flat_group = _FlatGroup(
                run,
                num_shards=self.comm.degree(self.axis),
                index=self.comm.index(self.axis),
            )
            flat_groups.append(flat_group)
        return flat_groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only torch's constructor may call it.

        Raises:
            PlanError: parameters are added later, which would not be sharded.
        """
        if hasattr(self, "inner"):
            fault = Fault(
                "ShardedOptimizer",
                "parameters cannot be added: states are sharded when it is made",
                fix="make a new ShardedOptimizer of all parameters",
            )
            raise PlanError(fault)
        super().add_param_group(param_group)

    def _check_unfrozen(self) -> None:
        """Reject a gradient of a parameter that was frozen when states were sharded: it would not
        be updated.
        """
        for param in self._frozen:
            if param.grad is not None:
                fault = Fault(
                    "ShardedOptimizer",
                    "requires_grad of a parameter has changed since the optimizer was made",
                    got=f"a gradient of shape {list(param.shape)}",
                    need="none, as the parameter was frozen",
                    fix="set requires_grad before, or make a new ShardedOptimizer",
                )
                raise PlanError(fault)

    def _copy_settings_from_inner(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_settings(inner))

    def _copy_settings_to_inner(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_settings(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters; a collective over all ranks. Returns what `closure`, called first,
        returns.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_unfrozen()
        self._copy_settings_to_inner()
        for flat_group in self._flat_groups:
            flat_group.check_memory()
            flat_group.set_shard_grads()
        self.inner.step()
        works: list[Work] = []
        for flat_group in self._flat_groups:
            unsharded = flat_group.params_memory.alias()
            work = self.comm.start_all_gather_(unsharded, self.axis)
            works.append(work)
        for flat_group, work in zip(self._flat_groups, works, strict=True):
            work.wait()
            flat_group.clear_shard_grads()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's shard: it can be loaded on the same number of ranks alone."""
        self._copy_settings_to_inner()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned on this rank."""
        self.inner.load_state_dict(state_dict)
        self._copy_settings_from_inner()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the plain optimizer over unsharded parameters, on every rank; a
        collective over all ranks.
        """
        state_of: dict[int, State] = {}
        for flat_group in self._flat_groups:
            gathered = flat_group.gather_states(
                self.inner.state,
                self.comm,
                self.axis,
                elementwise=self._elementwise_keys,
            )
            state_of.update(gathered)
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
        self.inner.state.clear()
        for flat_group in self._flat_groups:
            sharded = flat_group.shard_states(
                states,
                elementwise=self._elementwise_keys,
            )
            self.inner.state.update(sharded)
        for own_group, loaded_group in zip(self.param_groups, groups, strict=True):
            own_group.update(_settings(loaded_group))

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
        entries: which entries of each flattened parameter those are.
    """

    def __init__(
        self,
        params: list[nn.Parameter],
        *,
        num_shards: int,
        index: int,
    ) -> None:
        named: dict[str, nn.Parameter] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for number, param in enumerate(params):
            name = str(number)
            named[name] = param
            shapes[name] = tuple(param.shape)
        self.params = params
        self.layout = FlatLayout.of(shapes, num_shards)
        self.params_memory = FlatParams(
            named,
            self.layout,
            dtype=params[0].dtype,
        )
        own_slice = self.layout.shard_slice(index)
        shard = self.params_memory.flat[own_slice]
        views = self.layout.shard_views(shard, index)
        self.shards = list(map(nn.Parameter, views.values()))
        self.entries: list[slice] = []
        for span in self.layout.spans:
            overlap = self.layout.overlap(span, index)
            self.entries.append(overlap.in_param)

    def check_memory(self) -> None:
        """Reject parameters that are no longer views of the flat memory.

        Raises:
            PlanError: updates would be lost.
        """
        start = self.params_memory.flat.data_ptr()
        for param, span in zip(self.params, self.layout.spans, strict=True):
            is_view = param.data_ptr() == start + span.start * param.element_size()
            if param.numel() > 0 and not is_view:
                shape = list(param.shape)
                reject_other_memory(f"a parameter of shape {shape}", "ShardedOptimizer")

    def set_shard_grads(self) -> None:
        """Set each shard's gradient to a view of its entries of the parameter's gradient."""
        for param, shard, entries in zip(self.params, self.shards, self.entries, strict=True):
            if param.grad is None:
                shard.grad = None
                continue
            flat = param.grad.reshape(-1)
            shard.grad = flat[entries]

    def clear_shard_grads(self) -> None:
        """Drop the references to the views."""
        for shard in self.shards:
            shard.grad = None

    def gather_states(
        self,
        state: Mapping[Tensor, State],
        comm: Comm,
        axis: Axis,
        *,
        elementwise: Collection[str],
    ) -> dict[int, State]:
        """The state of each unsharded parameter, by its id; the keys `elementwise` are
        all-gathered.
        """
        found: dict[int, State] = {}
        for param, shard, span in zip(self.params, self.shards, self.layout.spans, strict=True):
            sizes: list[int] = []
            for index in range(self.layout.num_shards):
                entries = self.layout.overlap(span, index).in_param
                sizes.append(entries.stop - entries.start)
            unsharded: State = {}
            for key, value in state.get(shard, {}).items():
                if key in elementwise:
                    gathered = comm.all_gather(value, axis, sizes=sizes)
                    unsharded[key] = gathered.view(param.shape)
                else:
                    unsharded[key] = _copy(value)
            found[id(param)] = unsharded
        return found

    def shard_states(
        self,
        states: Mapping[int, State],
        *,
        elementwise: Collection[str],
    ) -> dict[Tensor, State]:
        """The state of each shard, from the states of unsharded parameters by id."""
        found: dict[Tensor, State] = {}
        for param, shard, entries in zip(self.params, self.shards, self.entries, strict=True):
            sharded: State = {}
            for key, value in states[id(param)].items():
                if key in elementwise:
                    flat = value.reshape(-1)
                    sharded[key] = flat[entries].clone()
                else:
                    sharded[key] = _copy(value)
            if sharded:
                found[shard] = sharded
        return found


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
