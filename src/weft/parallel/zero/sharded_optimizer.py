"""Owns `ShardedOptimizer`: any torch optimizer of whose states each rank holds its share (ZeRO 1), in a plain script."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm.adopt import comm_or_world
from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.errors import DataError, Fault, PlanError
from weft.parallel.zero.flat import FlatLayout, FlatParams


class ShardedOptimizer(Optimizer):
    """Moves this rank's share of every parameter, then brings the others' here; states are held for that share alone.

        net = weft.DistributedDataParallel(net)
        optimizer = weft.ShardedOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-3)
        net(x).sum().backward()
        net.finish_gradient_synchronization()      # gradients must be the same on every rank
        optimizer.step()

    `param_groups` hold the whole parameters, and the settings: schedulers set "lr" there. Frozen parameters and those
    without a gradient stay as they are. `state_dict()` is of this rank's share, `full_state_dict()` of all.

    Args:
        params: as a torch optimizer takes them: parameters, (name, parameter) pairs, or groups of either.
        optimizer: the class, for example torch.optim.AdamW; it must move every entry of a parameter by itself.
        comm: this rank's way to the others; None: the world that torch.distributed was initialised with is the data axis.
        axis: the mesh axis (or axes) over which states are spread.
        kwargs: for the class.

    Raises:
        PlanError: the class moves an entry by what the others of its parameter are (LBFGS, Muon, Adafactor).

    Source: Rajbhandari et al. 2020, ZeRO.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer: Callable[..., Optimizer],
        comm: Comm | None = None,
        *,
        axis: Axis = "dp",
        **kwargs: Any,
    ) -> None:
        super().__init__(params, kwargs)
        first: Tensor = self.param_groups[0]["params"][0]
        self._entry_keys = entry_keys(lambda tensors: optimizer(tensors, **kwargs), device=first.device)
        self.comm, self.axis = comm_or_world(comm, axis=axis, device=first.device), axis
        degree, self._index = self.comm.degree(axis), self.comm.index(axis)
        flats = [[_Flat(members, degree, self._index) for members in _alike(group)] for group in self.param_groups]
        self._flats = [flat for group in flats for flat in group]
        groups = zip(self.param_groups, flats, strict=True)
        self.inner = optimizer(
            [{**_settings(group), "params": [x for flat in mine for x in flat.shards]} for group, mine in groups],
            **kwargs,
        )
        self._take_settings()

    def _take_settings(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_settings(inner))

    def _give_settings(self) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner.update(_settings(group))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the parameters; every rank must step. Returns what `closure`, called first, returns."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._give_settings()
        for flat in self._flats:
            flat.lend_gradients()
        self.inner.step()
        works = [self.comm.start_all_gather_(flat.whole.alias(), self.axis) for flat in self._flats]
        for flat, work in zip(self._flats, works, strict=True):
            work.wait()
            for shard in flat.shards:
                shard.grad = None
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's share: good for the same number of ranks alone."""
        self._give_settings()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict` gave on this rank."""
        self.inner.load_state_dict(state_dict)
        self._take_settings()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict of the plain optimizer over whole parameters, on every rank; every rank must ask."""
        found: dict[int, dict[str, Any]] = {}
        for flat in self._flats:
            found |= flat.whole_states(self.inner.state, self.comm, self.axis, keys=self._entry_keys)
        numbers = {id(param): number for number, param in enumerate(self._params())}
        return {**super().state_dict(), "state": {numbers[key]: state for key, state in found.items() if state}}

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take this rank's share of a state dict of the plain optimizer over whole parameters.

        Raises:
            DataError: it is of other parameters.
        """
        params, groups = self._params(), state_dict["param_groups"]
        if (given := sum(len(group["params"]) for group in groups)) != len(params):
            raise DataError(Fault("state", "is of another number of parameters", str(given), str(len(params))))
        states = {id(param): state_dict["state"].get(number, {}) for number, param in enumerate(params)}
        for flat in self._flats:
            self.inner.state.update(flat.own_states(states, keys=self._entry_keys))
        for group, theirs in zip(self.param_groups, groups, strict=True):
            group.update(_settings(theirs))

    def _params(self) -> list[nn.Parameter]:
        return [param for group in self.param_groups for param in group["params"]]


class _Flat:
    """Parameters of one group, alike in dtype and device, in one flat memory of which this rank's optimizer sees a shard."""

    def __init__(self, params: list[nn.Parameter], degree: int, index: int) -> None:
        named = {str(place): param for place, param in enumerate(params)}
        self.params, self.index = params, index
        self.layout = FlatLayout.of({name: tuple(param.shape) for name, param in named.items()}, degree)
        self.whole = FlatParams(named, self.layout, dtype=params[0].dtype)
        self.own = self.whole.flat[self.layout.shard_range(index)]
        self.shards = [nn.Parameter(entries) for entries in self.layout.shard_views(self.own, index).values()]
        self.cuts = [self.layout.cut(slot, index)[0] for slot in self.layout.slots]

    def lend_gradients(self) -> None:
        """Let each shard have its entries of the parameter's gradient, without copying."""
        for param, shard, cut in zip(self.params, self.shards, self.cuts, strict=True):
            shard.grad = None if param.grad is None else param.grad.reshape(-1)[cut]

    def whole_states(
        self, state: Mapping[Tensor, Mapping[str, Any]], comm: Comm, axis: Axis, *, keys: Collection[str]
    ) -> dict[int, dict[str, Any]]:
        """What is remembered of each parameter, by its id; what is remembered of every entry, `keys`, is gathered."""
        found: dict[int, dict[str, Any]] = {}
        for param, shard, slot in zip(self.params, self.shards, self.layout.slots, strict=True):
            cuts = (self.layout.cut(slot, index)[0] for index in range(self.layout.parts))
            sizes = [cut.stop - cut.start for cut in cuts]
            found[id(param)] = {
                key: comm.all_gather(value, axis, sizes=sizes).view(param.shape) if key in keys else _copy(value)
                for key, value in state.get(shard, {}).items()
            }
        return found

    def own_states(
        self, whole: Mapping[int, Mapping[str, Any]], *, keys: Collection[str]
    ) -> dict[Tensor, dict[str, Any]]:
        """This rank's share of what is remembered of each parameter, by its id."""
        return {
            shard: {
                key: value.reshape(-1)[cut].clone() if key in keys else _copy(value)
                for key, value in whole[id(param)].items()
            }
            for param, shard, cut in zip(self.params, self.shards, self.cuts, strict=True)
            if whole[id(param)]
        }  # fmt: skip


def entry_keys(make: Callable[[list[nn.Parameter]], Optimizer], *, device: torch.device) -> frozenset[str]:
    """Names of what an optimizer remembers of every entry, once it is seen to move each by itself: it is tried out.

    Raises:
        PlanError: a parameter in two pieces moves otherwise than in one.
    """
    start, *gradients = torch.rand(3, 4, 3, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(device)
    whole = nn.Parameter(start.clone())
    pieces = [nn.Parameter(piece.clone()) for piece in start.flatten().split((5, 7))]
    try:
        optimizers = make([whole]), make(pieces)
        for gradient in gradients:
            whole.grad = gradient
            for piece, part in zip(pieces, gradient.flatten().split((5, 7)), strict=True):
                piece.grad = part
            for optimizer in optimizers:
                optimizer.step()
        moves_alone = torch.allclose(
            whole.detach().flatten(), torch.cat([piece.detach() for piece in pieces]), rtol=1e-5
        )
    except (TypeError, ValueError) as error:  # a closure that is missing, shapes that it does not take
        raise PlanError(_not_alone(f"it says {str(error).splitlines()[0]!r}")) from error
    if not moves_alone:
        raise PlanError(_not_alone("the same steps in two pieces gave other values"))
    return frozenset(
        key for key, x in optimizers[0].state[whole].items() if isinstance(x, Tensor) and x.shape == whole.shape
    )


def _not_alone(seen: str) -> Fault:
    need = "one that moves every entry by itself, as SGD and AdamW do"
    return Fault("optimizer", "takes a parameter as a whole, so it cannot move a share of it", seen, need)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _alike(group: Mapping[str, Any]) -> Iterator[list[nn.Parameter]]:
    """The trained parameters of a group, in runs of the same dtype and device."""
    trained = [param for param in group["params"] if param.requires_grad]
    for _, run in groupby(trained, key=lambda param: (param.dtype, param.device)):
        yield list(run)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group says besides its parameters."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}
