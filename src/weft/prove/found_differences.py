"""Differences of ranks from one device: tensors and numbers beyond their bounds, and statistics by phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.core.dimension import activation_axes
from weft.core.mesh import Mesh
from weft.prove.bounds import Bounds, largest_difference
from weft.prove.localise import Failure
from weft.prove.places import Whole
from weft.prove.record import Observed, RankRecord, Site
from weft.prove.reference_trace import TensorKey
from weft.prove.report import PHASES, Phase, PhaseBound

PHASE_OF_GRADIENTS: frozenset[Phase] = frozenset(
    ("backward", "reduce", "norm", "clip", "moments", "update")
)
STEP_NUMBERS: frozenset[Phase] = frozenset(("loss", "norm", "clip"))
"""Phases of numbers that every rank gets from one collective."""


@dataclass
class PhaseStats:
    """How close the tensors of a phase came to their bounds."""

    compared: int = 0
    largest: float = 0.0
    bound: float = 0.0
    closest: float = -1.0

    def add(self, relative: float, bound: float) -> None:
        """Count one tensor."""
        self.compared += 1
        ratio = relative / bound if bound else (0.0 if relative == 0 else math.inf)
        if ratio > self.closest:
            self.closest = ratio
            self.largest = relative
            self.bound = bound


@dataclass
class FoundDifferences:
    """What the comparison of one run with a reference has found so far.

    Attributes:
        failures: tensors beyond their bounds, by what they are and by rank.
        uncompared: logical tensors that the reference does not have in that shape.
        notes: what else is not compared.
    """

    mesh: Mesh
    records: Sequence[RankRecord]
    bounds: Bounds
    stats: dict[Phase, PhaseStats] = field(default_factory=dict)
    failures: dict[Site, dict[int, Failure]] = field(default_factory=dict)
    uncompared: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def phase_bounds(self) -> tuple[PhaseBound, ...]:
        """How close each phase came to its bounds."""
        found = []
        for phase in PHASES:
            stats = self.stats.get(phase)
            if stats is not None:
                closest = max(stats.closest, 0.0)
                found.append(PhaseBound(phase, stats.compared, stats.largest, stats.bound, closest))
        return tuple(found)

    def is_skipped(self, site: Site) -> bool:
        """Whether the gradients of a step overflowed: they have no values to compare."""
        return site.step in self.bounds.plain.skipped and site.phase in PHASE_OF_GRADIENTS

    def check(
        self, site: Site, rank: int, observed: Observed, expected: Tensor, key: TensorKey
    ) -> None:
        value = observed.value
        bound = self.bounds.bound(key)
        relative = largest_difference(value, expected) / self.bounds.scale(key)
        if relative > bound and site.phase == "backward" and site.micro_batch is not None:
            relative = min(relative, self._partial_relative(site, rank, expected, key))
        if relative > bound:
            relative = min(relative, self._determined_relative(site, observed, expected, key))
        self.stats.setdefault(site.phase, PhaseStats()).add(relative, bound)
        if not relative <= bound:
            failure = Failure(rank, observed, expected, relative, bound)
            self.failures.setdefault(site, {})[rank] = failure

    def _determined_relative(
        self, site: Site, observed: Observed, expected: Tensor, key: TensorKey
    ) -> float:
        """Of the entries of a parameter whose update does not depend on rounding, if the others are
        within a few learning rates; else infinite.
        """
        step = site.step - 1 if site.tensor.endswith(" as used") else site.step
        is_value = site.phase in ("update", "checkpoint") and key.phase == "update"
        if not site.parameter or not (is_value or step < site.step):
            return math.inf
        whole = self.bounds.undetermined(site.parameter, step)
        mask = None if whole is None else observed.place.read(whole)
        if mask is None or observed.value.shape != expected.shape:
            return math.inf
        difference = (observed.value.double() - expected.double()).abs()
        is_free = mask.reshape(difference.shape)
        unit = self.bounds.types.eps * float(expected.abs().max())
        if not bool((difference[is_free] <= self.bounds.largest_updates(step) + unit).all()):
            return math.inf
        rest = difference[~is_free]
        largest = float(rest.max()) if rest.numel() else 0.0
        return largest / self.bounds.scale(key)

    def _partial_relative(self, site: Site, rank: int, expected: Tensor, key: TensorKey) -> float:
        """Of a gradient whose parts are summed over tensor-parallel ranks only later."""
        parts = []
        for member in self.mesh.group(rank, activation_axes()):
            observed = self.records[member].values.get(site)
            if observed is None or observed.value.shape != expected.shape:
                return math.inf
            parts.append(observed.value)
        if len(parts) == 1:
            return math.inf
        total = torch.stack(parts).double().sum(0)
        return largest_difference(total, expected) / self.bounds.scale(key)

    def fail(self, site: Site, failure: Failure) -> None:
        """Count a tensor that must be equal to the last bit."""
        self.stats.setdefault(site.phase, PhaseStats()).add(failure.measured, failure.bound)
        self.failures.setdefault(site, {}).setdefault(failure.rank, failure)

    def number(self, record: RankRecord, site: Site, value: float) -> None:
        key = TensorKey(site.step, site.phase, site.tensor)
        expected = self.bounds.plain.values.get(key)
        if expected is None:
            return
        tensor = torch.tensor(float(value), dtype=torch.float64)
        operation = record.norm_operations.get(site.step) if site.phase in STEP_NUMBERS else None
        if site.block:
            name = site.tensor.removeprefix(f"{site.block}.")
            operation = record.sum_operations.get((site.step, site.block, name))
        self.check(site, record.rank, Observed(tensor, Whole(), operation), expected, key)
