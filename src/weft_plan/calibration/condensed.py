"""Measured steps with the kernels between two collectives as one batch, for fits that predict each step many times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from weft.planner.measure.kernels import KernelBatch, KernelLaunch
from weft.planner.measure.recorder import Event, RecordedRegion
from weft.planner.measure.roles import RoleCosts


class _CondensedRegion(NamedTuple):
    """A region, which keeps its id, and its condensed copy."""

    region: RecordedRegion
    condensed: RecordedRegion


class Condenser:
    """Makes condensed copies; equal batches are one object, and equal regions of a role too.

    The predicted time of a condensed step differs by rounding alone.
    """

    def __init__(self) -> None:
        self._batches: dict[frozenset[tuple[KernelLaunch, int]], KernelBatch] = {}
        self._regions: dict[int, _CondensedRegion] = {}

    def roles(self, roles: Sequence[RoleCosts]) -> tuple[RoleCosts, ...]:
        """The roles of a step with condensed regions."""
        return tuple(self._role(role) for role in roles)

    def _role(self, role: RoleCosts) -> RoleCosts:
        actions = {}
        for key, region in role.step.actions.items():
            actions[key] = self.region(region)
        phases = {}
        for name, region in role.step.phases.items():
            phases[name] = self.region(region)
        step = replace(role.step, actions=actions, phases=phases, regions=())
        return replace(role, step=step)

    def region(self, region: RecordedRegion) -> RecordedRegion:
        """A condensed region."""
        known = self._regions.get(id(region))
        if known is not None:
            return known.condensed
        events = self._events(region.events)
        condensed = replace(region, events=events, segments=[])
        self._regions[id(region)] = _CondensedRegion(region, condensed)
        return condensed

    def _events(self, events: Sequence[Event]) -> list[Event]:
        found: list[Event] = []
        launches: Counter[KernelLaunch] = Counter()
        for event in events:
            if isinstance(event, KernelLaunch):
                launches[event] += 1
                continue
            if launches:
                found.append(self._batch(launches))
                launches = Counter()
            found.append(event)
        if launches:
            found.append(self._batch(launches))
        return found

    def _batch(self, launches: Counter[KernelLaunch]) -> KernelBatch:
        first = next(iter(launches))
        if isinstance(first, KernelBatch) and launches.total() == 1:
            return first
        parts = frozenset(launches.items())
        known = self._batches.get(parts)
        if known is None:
            known = KernelBatch.of(launches)
            self._batches[parts] = known
        return known
