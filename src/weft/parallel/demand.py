"""Owns parameters that come on demand: gathered before their module runs, the next one's beside it, given away after.

    forward     gather 0 ─ block 0 ──────── block 1 ──────── block 2 ...
                           gather 1 ──────┘ gather 2 ──────┘               the next block's, while this one computes
    backward    ... block 2 ──────── block 1 ──────── block 0
                    gather 1 ──────┘ gather 0 ──────┘                      the previous block's
                            reduce 2 ───────────────┘                      zero.py, as gradients arrive

A unit stays while one of its blocks runs backward, also where a forward is played again meanwhile. After the backward it
is given away when its last gradient has come, or else, where one does not come (parameters that are frozen, unused, or
whose gradients are computed later), when the whole backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.tree import tensors_in
from weft.parallel.unit import Unit


def gather_on_demand(blocks: Sequence[nn.Module], units: Iterable[Unit]) -> None:
    """Let `blocks`, which run in this order, find the values of those of `units` that are not there all the time."""
    by_param = {id(param): unit for unit in units if unit.is_on_demand for param in unit.params.values()}
    needs = [_units_of(block, by_param) for block in blocks]
    demand = _Demand()
    for place, block in enumerate(blocks):
        after = needs[place + 1] if place + 1 < len(blocks) else ()
        before = needs[place - 1] if place else ()
        if needs[place]:
            _install(block, demand, needs[place], after=after, before=before)


def _units_of(block: nn.Module, by_param: Mapping[int, Unit]) -> tuple[Unit, ...]:
    found = {id(unit): unit for param in block.parameters() if (unit := by_param.get(id(param))) is not None}
    return tuple(found.values())


def after_this_backward(act: Callable[[], None]) -> None:
    """Call `act` at the end of the backward that is under way in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


class _Demand:
    """Which units a backward under way has in use."""

    def __init__(self) -> None:
        self.in_use: dict[int, Unit] = {}

    def use(self, units: Iterable[Unit]) -> None:
        """Have these until the backward is over."""
        if not self.in_use:
            after_this_backward(self._backward_is_over)
        for unit in units:
            self.in_use[id(unit)] = unit
            unit.finish_gather()

    def is_used(self, unit: Unit) -> bool:
        """Whether a backward under way needs the unit."""
        return id(unit) in self.in_use

    def _backward_is_over(self) -> None:
        for unit in self.in_use.values():
            unit.release()
        self.in_use.clear()


def _install(
    block: nn.Module,
    demand: _Demand,
    units: tuple[Unit, ...],
    *,
    after: tuple[Unit, ...],
    before: tuple[Unit, ...],
) -> None:
    def enter(_: nn.Module, args: Any) -> None:
        for unit in units:
            unit.finish_gather()
        if not any(demand.is_used(unit) for unit in units):
            for unit in after:
                unit.start_gather()

    def leave(_: nn.Module, args: Any, out: Any) -> None:
        for unit in units:
            if not demand.is_used(unit) and not any(unit is other for other in after):
                unit.release()
        for y in tensors_in(out):
            if y.requires_grad:
                y.register_hook(begin_backward)

    def begin_backward(_: Tensor) -> None:
        demand.use(units)
        for unit in before:
            unit.start_gather()

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave)
