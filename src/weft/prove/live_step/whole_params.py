"""Whole parameters of single blocks on every rank: each entry comes from the first rank that holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from weft.checkpoint.state import MODEL, ParamState, param_values
from weft.comm.comm import Comm
from weft.core.axes import world_partition
from weft.core.dimension import local_update_axes
from weft.models.common.init import path_below
from weft.train.step import TrainStep


def exact_partition(comm: Comm) -> tuple[tuple[str, ...], ...]:
    """Groups of mesh axes that, one after the other, reach every rank that trains the same replica:
    all ranks, or those of one site. Training uses these groups, too.
    """
    apart = set(local_update_axes())
    return tuple(axes for axes in world_partition(comm.mesh) if apart.isdisjoint(axes))


def sum_over_ranks(comm: Comm, x: Tensor) -> Tensor:
    """The sum of every rank's tensor, in place; every rank must call it."""
    for axes in exact_partition(comm):
        comm.all_reduce_(x, axes)
    return x


def largest_over_ranks(comm: Comm, x: Tensor) -> Tensor:
    """The largest of every rank's entries, in place; every rank must call it."""
    for axes in exact_partition(comm):
        comm.all_reduce_(x, axes, op="max")
    return x


class WholeParameters:
    """Gathers whole parameters from the shards of all ranks.

    Args:
        dtype: in which the optimizer updates them.
        on_gathered: called with what is gathered.

    Attributes:
        unequal: owners of which this rank holds other bits than the first rank that holds them.
    """

    def __init__(
        self,
        step: TrainStep,
        dtype: torch.dtype,
        *,
        on_gathered: Callable[[Mapping[str, Tensor]], None],
    ) -> None:
        self.step = step
        self.dtype = dtype
        self.on_gathered = on_gathered
        self.unequal: set[str] = set()

    @cached_property
    def _states(self) -> dict[str, list[ParamState]]:
        """This rank's entries of parameters, by owner."""
        found: dict[str, list[ParamState]] = {}
        for state in param_values(self.step.model, self.step.grads):
            found.setdefault(state.param.owner, []).append(state)
        return found

    def least_over_ranks(self, number: int) -> int:
        """The least of every rank's numbers; every rank must call it."""
        comm = self.step.model.comm
        negative = torch.tensor([-number], dtype=torch.int64, device=comm.device)
        return -int(largest_over_ranks(comm, negative))

    def gather(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """The whole parameters of these owners, in the dtype that the optimizer updates; every rank
        must call it with the same owners.
        """
        comm = self.step.model.comm
        sizes = [torch.Size(shape).numel() for shape in shapes.values()]
        flat = torch.zeros(sum(sizes), dtype=self.dtype, device=comm.device)
        whole = {}
        for (owner, shape), part in zip(shapes.items(), flat.split(sizes), strict=True):
            whole[owner] = part.view(shape)
        with torch.no_grad():
            self._write(whole)
            sum_over_ranks(comm, flat)
            self._compare(whole)
            self.on_gathered(whole)
        return whole

    @torch.no_grad()
    def gather_buffers(self, modules: Mapping[str, nn.Module]) -> None:
        """Give these modules the values that their buffers have in the run; every rank must call it with
        the same modules.
        """
        comm = self.step.model.comm
        buffers = {
            path_below(name, key): buffer
            for name, module in modules.items()
            for key, buffer in module._buffers.items()
            if buffer is not None
        }
        for name, buffer in buffers.items():
            whole = torch.zeros_like(buffer, dtype=torch.float64)
            for state in self._states.get(name, ()):
                if self._is_first(state):
                    whole.copy_(state.tensors[MODEL])
            buffer.copy_(sum_over_ranks(comm, whole))

    def _write(self, whole: Mapping[str, Tensor]) -> None:
        """Write the entries that this rank is the first to hold."""
        for owner, tensor in whole.items():
            for state in self._states.get(owner, ()):
                if self._is_first(state):
                    for box_entries, entries in _pieces(state, tensor):
                        box_entries.copy_(entries)

    def _compare(self, whole: Mapping[str, Tensor]) -> None:
        """Find entries of this rank that are not those of the first rank."""
        for owner, tensor in whole.items():
            for state in self._states.get(owner, ()):
                for box_entries, entries in _pieces(state, tensor):
                    if not torch.equal(box_entries, entries):
                        self.unequal.add(owner)

    def _is_first(self, state: ParamState) -> bool:
        axes = tuple(axis for axis in state.replica_axes if axis not in local_update_axes())
        return not state.is_alias and self.step.model.comm.index(axes) == 0


def _pieces(state: ParamState, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Each box of a whole parameter that this rank holds, and this rank's entries of it."""
    state = state.dequantized()
    flat = state.tensors[MODEL].detach().reshape(-1)
    found = []
    start = 0
    for box in state.boxes:
        entries = flat[start : start + box.size].view(box.shape)
        found.append((whole[box.slices], entries))
        start += box.size
    return found
