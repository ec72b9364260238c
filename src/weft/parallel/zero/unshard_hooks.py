"""Owns parameters that come on demand: gathered before their module runs, the next one's beside it, given away after.

    forward     gather 0 ─ block 0 ──────── block 1 ──────── block 2 ...
                           gather 1 ──────┘ gather 2 ──────┘               the next block's, while this one computes
    backward    ... block 2 ──────── block 1 ──────── block 0
                    gather 1 ──────┘ gather 0 ──────┘                      the previous block's
                            reduce 2 ───────────────┘                      zero.py, as gradients arrive

A unit stays while one of its blocks runs backward, also where a forward is played again meanwhile. After the backward it
is given away when its last gradient has come (zero.py); a frozen one when the gradients of its block's inputs have; and
where neither comes (parameters that are not used, or whose gradients are computed later) when the whole backward is over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.parallel.model.tree import tensors_in
from weft.parallel.zero.param_group import ParamGroup


@dataclass(frozen=True)
class Needs:
    """A module, and the units whose values its forward and backward need."""

    module: nn.Module
    units: tuple[ParamGroup, ...]


def units_of(params: Iterable[nn.Parameter], units: Iterable[ParamGroup]) -> tuple[ParamGroup, ...]:
    """Those of `units` that hold one of `params` and are not there all the time."""
    by_param = {id(param): unit for unit in units if unit.is_on_demand for param in unit.params.values()}
    return tuple({id(unit): unit for param in params if (unit := by_param.get(id(param))) is not None}.values())


def gather_on_demand(chains: Sequence[Sequence[Needs]]) -> None:
    """Let modules find the values of their units. Those of one chain run in its order; neighbours fetch for each other."""
    demand = _Demand()
    for chain in chains:
        for place, needs in enumerate(chain):
            after = chain[place + 1].units if place + 1 < len(chain) else ()
            before = chain[place - 1].units if place else ()
            if needs.units:
                _install(demand, needs, after=after, before=before)


def after_this_backward(act: Callable[[], None]) -> None:
    """Call `act` at the end of the backward that is under way in this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(act)


class _Demand:
    """Which units a backward under way has in use."""

    def __init__(self) -> None:
        self.in_use: dict[int, ParamGroup] = {}

    def use(self, units: Iterable[ParamGroup]) -> None:
        """Have these until they are given back, or the backward is over."""
        if not self.in_use:
            after_this_backward(self._backward_is_over)
        for unit in units:
            self.in_use[id(unit)] = unit
            unit.finish_gather()

    def give_back(self, units: Iterable[ParamGroup]) -> None:
        """These are needed no longer."""
        for unit in units:
            unit.release()

    def is_used(self, unit: ParamGroup) -> bool:
        """Whether a backward under way needs the unit."""
        return id(unit) in self.in_use

    def _backward_is_over(self) -> None:
        self.give_back(self.in_use.values())
        self.in_use.clear()


def _install(demand: _Demand, needs: Needs, *, after: tuple[ParamGroup, ...], before: tuple[ParamGroup, ...]) -> None:
    units, frozen = needs.units, tuple(unit for unit in needs.units if not unit.is_trained)

    def enter(_: nn.Module, args: Any, kwargs: Any) -> None:
        for unit in units:
            unit.finish_gather()
        if not any(demand.is_used(unit) for unit in units):
            for unit in after:
                unit.start_gather()
        if frozen and torch.is_grad_enabled():
            _when_all_have_gradients([x for x in tensors_in((args, kwargs)) if x.requires_grad], done)

    def done() -> None:
        demand.give_back(frozen)

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

    needs.module.register_forward_pre_hook(enter, with_kwargs=True)
    needs.module.register_forward_hook(leave)


def _when_all_have_gradients(tensors: Sequence[Tensor], act: Callable[[], None]) -> None:
    missing = len(tensors)

    def arrived(_: Tensor) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            act()

    for tensor in tensors:
        tensor.register_hook(arrived)
