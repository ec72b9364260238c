"""Compare the records of all ranks with the one-device reference, tensor by tensor, within bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from weft.core.mesh import Mesh
from weft.prove.bounds import Bounds
from weft.prove.found_differences import FoundDifferences
from weft.prove.gradient_sums import GradientSums
from weft.prove.localise import Localisation
from weft.prove.own_state import OwnState
from weft.prove.rank_sums import RankSums
from weft.prove.rank_values import RankValues
from weft.prove.record import RankRecord, Site
from weft.prove.report import Difference

MOST_REROUTED = 0.05
"""Share of the tokens of a step that rounding may route otherwise, and the number below."""
MIN_REROUTED = 2.0


@dataclass(frozen=True)
class Judge:
    """Compares the records of one run with a reference.

    Args:
        has_sharded_activations: whether sequence parallelism makes gradients of replicated
            parameters parts of a sum.
    """

    mesh: Mesh
    records: Sequence[RankRecord]
    bounds: Bounds
    has_sharded_activations: bool = False

    @cached_property
    def found(self) -> FoundDifferences:
        """What has been compared so far."""
        return FoundDifferences(self.mesh, self.records, self.bounds)

    @cached_property
    def sums(self) -> GradientSums:
        """The gradients of all ranks before their reduction."""
        return GradientSums(self.mesh, self.records, self.bounds)

    @property
    def _localisation(self) -> Localisation:
        return Localisation(self.mesh, self.records, self.bounds, self.found.failures, self.sums)

    def compare(self) -> tuple[Difference, ...]:
        """Compare everything; the differences in the order of execution."""
        values = RankValues(self.found)
        for record in self.records:
            values.compare(record)
        RankSums(self.found, self.sums, self.has_sharded_activations).compare()
        state = OwnState(self.found)
        state.compare_coverage()
        state.compare()
        # Last, since it removes failures that the comparisons above have added.
        self._drop_after_rerouting()
        return self._localisation.differences()

    def _drop_after_rerouting(self) -> None:
        """Rounding may decide to which expert a token goes, in 16 bits, and where an optimizer makes
        full updates of it. Then what follows is of other tokens, and bounds say nothing of it: the
        same layout was compared in float64 before, or is compared up to there.
        """
        types = self.bounds.types
        magnifies_rounding = types.is_exact and bool(self.bounds.perturbed)
        if types.eps <= torch.finfo(torch.float32).eps and not magnifies_rounding:
            return
        for site in sorted(self.found.rerouted, key=self._localisation.order):
            failure = self.found.rerouted[site]
            load_E = failure.expected.double()
            difference_E = failure.observed.value.double() - load_E
            num_tokens = float(load_E.sum())
            num_moved = float(difference_E.abs().sum()) / 2
            # So many tokens do not move by rounding; a later block that moves few of them does not
            # excuse what follows, since that may be due to this one.
            if num_moved > max(MOST_REROUTED * num_tokens, MIN_REROUTED):
                return
            if self._drop_after(site):
                self.found.notes.append(
                    f"not compared: what follows {site.block} in step {site.step}, "
                    f"where rounding routes {num_moved:g} of {num_tokens:g} tokens to other experts"
                )
                return

    def _drop_after(self, routed: Site) -> bool:
        """Forget failures that may follow from another routing, and say whether there were any; those
        of equality to the bit stay.
        """
        num_failures = self._num_failures
        blocks = self.bounds.plain.blocks
        num_before = blocks.index(routed.block)
        blocks_before = set(blocks[:num_before])
        for site in list(self.found.failures):
            if site.step < routed.step or site.phase == "batch":
                continue
            is_forward = site.step == routed.step and site.phase == "forward"
            if is_forward and site.block in blocks_before:
                continue
            kept = {
                rank: failure
                for rank, failure in self.found.failures.pop(site).items()
                if failure.bound == 0.0
            }
            if kept:
                self.found.failures[site] = kept
        return self._num_failures < num_failures

    @property
    def _num_failures(self) -> int:
        return sum(map(len, self.found.failures.values()))
