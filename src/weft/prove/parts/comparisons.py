"""Comparison of named tensors with right ones, in the order in which they are computed, as one pass of a report."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from weft.core.mesh import Mesh
from weft.prove.bounds import largest_difference
from weft.prove.found_differences import PhaseStats
from weft.prove.relations import relation
from weft.prove.report import PHASES, Difference, Pass, Phase, PhaseBound


@dataclass(frozen=True)
class Compared:
    """What a tensor is that is compared; the attributes are those of `Difference`."""

    tensor: str
    phase: Phase
    step: int
    block: str = ""
    parameter: str = ""
    micro_batch: int | None = None


@dataclass
class Comparisons:
    """What has been compared so far.

    Args:
        mesh: of the ranks that compute the tensors.
    """

    mesh: Mesh
    differences: list[Difference] = field(default_factory=list)
    stats: dict[Phase, PhaseStats] = field(default_factory=dict)

    def check(
        self,
        what: Compared,
        measured: Tensor,
        expected: Tensor,
        *,
        ranks: tuple[int, ...],
        bound: float,
    ) -> bool:
        """Compare a tensor; whether it is equal.

        Args:
            ranks: that hold it.
            bound: largest difference, relative to the largest right entry; 0: the same bits.
        """
        measured = measured.reshape(expected.shape) if _fits(measured, expected) else measured
        distance = _distance(measured, expected)
        stats = self.stats.setdefault(what.phase, PhaseStats())
        stats.add(distance, bound)
        is_equal = distance <= bound
        if not is_equal:
            text = relation(measured, expected, candidates={})
            self.fail(what, text, ranks=ranks, measured=distance, bound=bound)
        return is_equal

    def fail(
        self,
        what: Compared,
        text: str,
        *,
        ranks: tuple[int, ...],
        measured: float,
        bound: float = 0.0,
    ) -> None:
        """Add a difference."""
        axes = self.mesh.wide_axes
        found = Difference(
            tensor=what.tensor,
            block=what.block,
            parameter=what.parameter,
            phase=what.phase,
            step=what.step,
            micro_batch=what.micro_batch,
            axis=axes[0] if len(axes) == 1 else "",
            ranks=ranks,
            collective="",
            relation=text,
            measured=measured,
            bound=bound,
        )
        self.differences.append(found)

    def as_pass(self, name: str, bounds: str) -> Pass:
        """The comparisons as one pass of the report.

        Args:
            name: number types, and what was compared.
            bounds: where they come from.
        """
        rows = []
        for phase in PHASES:
            if phase not in self.stats:
                continue
            stats = self.stats[phase]
            closest = max(stats.closest, 0.0)
            rows.append(PhaseBound(phase, stats.compared, stats.largest, stats.bound, closest))
        return Pass(name, bounds, tuple(rows), tuple(self.differences))


def _fits(measured: Tensor, expected: Tensor) -> bool:
    return measured.numel() == expected.numel()


def _distance(measured: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest right entry; 0 for the same bits."""
    if measured.shape == expected.shape and torch.equal(measured, expected):
        return 0.0
    difference = largest_difference(measured, expected)
    scale = float(expected.double().abs().max()) if expected.numel() else 0.0
    return difference / scale if scale else difference
