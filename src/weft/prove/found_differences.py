"""Differences of ranks from one device: tensors and numbers beyond their bounds, and statistics by phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.comm.observe import Operation
from weft.core.dimension import activation_axes
from weft.core.mesh import Mesh
from weft.prove.bounds import Bounds
from weft.prove.localise import Failure
from weft.prove.places import Whole
from weft.prove.record import BlockNumber, Observed, RankRecord, Site
from weft.prove.reference_trace import TensorKey
from weft.prove.report import PHASES, Phase, PhaseBound

PHASE_OF_GRADIENTS: frozenset[Phase] = frozenset(
    ("backward", "reduce", "norm", "clip", "moments", "update")
)
STEP_NUMBERS: frozenset[Phase] = frozenset(("loss", "norm", "clip"))
"""Phases of numbers that every rank gets from one collective."""


EXPERT_LOAD = ".expert load"
"""End of the names of loads of experts."""


@dataclass
class PhaseStats:
    """How close the tensors of a phase came to their bounds."""

    compared: int = 0
    largest: float = 0.0
    bound: float = 0.0
    closest: float = -1.0

    def add(self, relative: float, bound: float, *, is_wide: bool = False) -> None:
        """Count one tensor; one with a wide bound is not called compared."""
        self.compared += not is_wide
        ratio = _share_of_bound(relative, bound)
        if ratio > self.closest:
            self.closest = ratio
            self.largest = relative
            self.bound = bound


def _share_of_bound(relative: float, bound: float) -> float:
    if bound:
        return relative / bound
    return 0.0 if relative == 0 else math.inf


@dataclass
class FoundDifferences:
    """What the comparison of one run with a reference has found so far.

    Attributes:
        failures: tensors beyond their bounds, by what they are and by rank.
        uncompared: logical tensors that the reference does not have in that shape.
        rerouted: loads of experts that differ at all, by what they are: rounding may route tokens
            otherwise, within the bound of a load, too.
        wide: tensor whose bound hides faults -> its widest bound.
        notes: what else is not compared.
    """

    mesh: Mesh
    records: Sequence[RankRecord]
    bounds: Bounds
    stats: dict[Phase, PhaseStats] = field(default_factory=dict)
    failures: dict[Site, dict[int, Failure]] = field(default_factory=dict)
    uncompared: set[str] = field(default_factory=set)
    rerouted: dict[Site, Failure] = field(default_factory=dict)
    wide: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def phase_bounds(self) -> tuple[PhaseBound, ...]:
        """How close each phase came to its bounds."""
        found = []
        for phase in PHASES:
            stats = self.stats.get(phase)
            if stats is None:
                continue
            bound = PhaseBound(
                phase, stats.compared, stats.largest, stats.bound, closest=max(stats.closest, 0.0)
            )
            found.append(bound)
        return tuple(found)

    @property
    def reference(self) -> Mapping[TensorKey, Tensor]:
        """The whole tensors of the one-device reference."""
        return self.bounds.plain.values

    def is_skipped(self, site: Site) -> bool:
        """Whether the gradients of a step overflowed: they have no values to compare."""
        return site.step in self.bounds.plain.skipped and site.phase in PHASE_OF_GRADIENTS

    def check(
        self, site: Site, rank: int, observed: Observed, expected: Tensor, key: TensorKey
    ) -> None:
        """Compare a tensor of a rank with the entries of the reference that it should hold."""
        bound = self.bounds.bound(key)
        relative = self.bounds.relative(observed.value, expected, key)
        if relative > bound and site.phase == "backward" and site.micro_batch is not None:
            of_sum = self._partial_relative(site, rank, expected, key)
            relative = min(relative, of_sum)
        if relative > bound:
            of_determined = self._determined_relative(site, observed, expected, key)
            relative = min(relative, of_determined)
        is_wide = bound > 0 and self.bounds.is_wide(key)
        if is_wide:
            self.wide[site.tensor] = max(bound, self.wide.get(site.tensor, 0.0))
        self._count(site, relative, bound, is_wide=is_wide)
        failure = Failure(rank, observed, expected, relative, bound)
        if relative and site.tensor.endswith(EXPERT_LOAD):
            self.rerouted.setdefault(site, failure)
        is_within = relative <= bound  # NaN is not
        if not is_within:
            self._failures_at(site)[rank] = failure

    def _count(self, site: Site, relative: float, bound: float, *, is_wide: bool = False) -> None:
        stats = self.stats.setdefault(site.phase, PhaseStats())
        stats.add(relative, bound, is_wide=is_wide)

    def _failures_at(self, site: Site) -> dict[int, Failure]:
        return self.failures.setdefault(site, {})

    def _determined_relative(
        self, site: Site, observed: Observed, expected: Tensor, key: TensorKey
    ) -> float:
        """Of the entries of a parameter, or of a row that is looked up, that differ by more than rounding
        of their own gradients explains; infinite where that is not known.
        """
        free = self._free(site, key)
        if free is None or observed.value.shape != expected.shape:
            return math.inf
        explained = observed.place.read(free)
        if explained is None:
            return math.inf
        difference = (observed.value.double() - expected.double()).abs()
        rounding = self.bounds.types.eps * float(expected.abs().max())
        # NaN is not explained, and stays the largest.
        rest = difference[~(difference <= explained.reshape(difference.shape) + rounding)]
        largest = float(rest.max()) if rest.numel() else 0.0
        return largest / self.bounds.scale(key)

    def _free(self, site: Site, key: TensorKey) -> Tensor | None:
        """For each entry of a whole tensor, how far rounding of gradients may move it; None: of the
        tensor as a whole alone is that known.
        """
        step = site.step
        is_value = site.phase in ("update", "checkpoint") and key.phase == "update"
        if site.tensor.endswith(" as used"):
            is_value = True
            step -= 1
        if not is_value:
            return self.bounds.free_outputs.get(key)
        return self.bounds.free_updates(site.parameter, step) if site.parameter else None

    def _partial_relative(self, site: Site, rank: int, expected: Tensor, key: TensorKey) -> float:
        """Of a gradient whose parts are summed over tensor-parallel ranks only later."""
        parts = []
        for member in self.mesh.group(rank, activation_axes()):
            record = self.records[member]
            observed = record.values.get(site)
            if observed is None or observed.value.shape != expected.shape:
                return math.inf
            parts.append(observed.value)
        if len(parts) == 1:
            return math.inf
        total = torch.stack(parts).double().sum(0)
        return self.bounds.relative(total, expected, key)

    def fail(self, site: Site, failure: Failure) -> None:
        """Count a tensor that must be equal to the last bit."""
        self._count(site, failure.measured, failure.bound)
        self._failures_at(site).setdefault(failure.rank, failure)

    def number(self, record: RankRecord, site: Site, value: float) -> None:
        """Compare a number of a rank with that of the reference, if that has it."""
        key = TensorKey(site.step, site.phase, site.tensor)
        expected = self.reference.get(key)
        if expected is None:
            return
        tensor = torch.tensor(float(value), dtype=torch.float64)
        operation = _operation_of_number(record, site)
        observed = Observed(tensor, Whole(), operation)
        self.check(site, record.rank, observed, expected, key)


def _operation_of_number(record: RankRecord, site: Site) -> Operation | None:
    """The operation that made a number of a rank, where it is recorded."""
    if site.block:
        name = site.tensor.removeprefix(f"{site.block}.")
        block_number = BlockNumber(site.step, site.block, name)
        return record.sum_operations.get(block_number)
    if site.phase in STEP_NUMBERS:
        return record.norm_operations.get(site.step)
    return None
