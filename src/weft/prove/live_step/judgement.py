"""Which numbers of a live step differ from one device by more than rounding explains. Pure: tables in, differences out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

from weft.prove.arithmetic import NumberTypes
from weft.prove.bounds import (
    FACTOR,
    FLOOR,
    KIND_SHARE,
    MIN_SCALE,
    TOLERANCE,
    is_wide,
    norm_rounding,
    wide_note,
)
from weft.prove.judge import MIN_REROUTED, MOST_REROUTED
from weft.prove.live_step.compared_numbers import (
    GradientRow,
    LiveDifference,
    OutputRow,
    StepNumbers,
)
from weft.prove.record import block_of
from weft.prove.report import Phase

ROUNDING_OF_ZERO = 1e-3
"""Bound, where no noise was measured, of a gradient that is nothing beside others, as that of the key
bias of softmax attention, which is zero in exact arithmetic. It is relative to the KIND_SHARE of the
largest one; what noise explains of it is as much."""
WIDE_PROJECTION = 0.02
"""A projection within a wider bound does not count as compared."""


@dataclass(frozen=True)
class Judgement:
    """Compares the tables of a step.

    Args:
        blocks: names of the chain, in order.
        unlike_definition: parameters whose initial values are not those that the config defines.
        unequal: parameters of which ranks hold different copies.
        outputs: in the order of execution.
        gradients: in the order in which the backward yields them.
        output_spread: relative change of the outputs of each block by noise.
        loss_spread: relative change of the loss of a micro-batch by noise.
        num_units: micro-batches whose gradients are added.
        num_terms: tokens whose gradients one pass adds, if bounds are to do without noise: rounding
            of sums alone; None: noise was measured.
    """

    blocks: Sequence[str]
    types: NumberTypes
    layout: StepNumbers
    plain: StepNumbers
    unlike_definition: Sequence[str]
    unequal: Sequence[str]
    outputs: Sequence[OutputRow]
    gradients: Sequence[GradientRow]
    output_spread: Mapping[str, float]
    loss_spread: float
    num_units: int
    num_terms: int | None = None

    @cached_property
    def differences(self) -> tuple[LiveDifference, ...]:
        """All differences, in the order of execution."""
        found = [*self._parameters(), *self._targets(), *self._outputs()]
        loads = list(self._loads())
        # Other tokens at an expert make other outputs, gradients and losses, of which bounds say nothing.
        if loads and self._is_rerouted_by_rounding:
            return tuple(each for each in found if self._is_before(each, loads[0].block))
        return (*found, *loads, *self._loss(), *self._all_gradients(), *self._norm())

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What was not compared, or not closely."""
        found = []
        loads = list(self._loads())
        if loads and self._is_rerouted_by_rounding:
            found.append(
                f"not compared: what follows {loads[0].block}, where rounding routes "
                f"{self._num_moved:g} tokens to other experts"
            )
        unseen = {row.block for row in self.outputs if row.layout is None}
        if unseen:
            found.append(f"not compared: outputs of {', '.join(sorted(unseen))}")
        if self.unseen:
            found.append(wide_note(self.unseen, "gradients"))
        return tuple(found)

    @cached_property
    def wide(self) -> dict[str, float]:
        """Gradients whose entries do not count as compared, with their relative bounds."""
        found = {}
        for row in self.gradients:
            bound = self.gradient_bound(row)
            scales = {"own": row.largest, "of_kind": self._largest_gradient}
            if not self._is_compared(row) or is_wide(bound, scale=self.scale(row), **scales):
                found[row.parameter] = bound
        return found

    @cached_property
    def projected(self) -> tuple[str, ...]:
        """Gradients that are compared as a whole, and not entry by entry."""
        return tuple(row.parameter for row in self.gradients if self._has_close_projection(row))

    @property
    def unseen(self) -> dict[str, float]:
        """Gradients that do not count as compared at all."""
        return {name: bound for name, bound in self.wide.items() if name not in self.projected}

    @property
    def closest(self) -> float:
        """Largest ratio of a difference to its bound, over gradients that count as compared: of their
        entries, or of the projection of one that is compared as a whole.
        """
        return max(self._ratios(), default=0.0)

    def _ratios(self) -> Iterator[float]:
        for row in self.gradients:
            if row.parameter not in self.wide:
                yield self.relative(row) / self.gradient_bound(row)
            elif row.parameter in self.projected:
                yield abs(row.projection - 1) / self.projection_bound(row)

    def _is_compared(self, row: GradientRow) -> bool:
        return not (row.is_router and self.types.has_16_bits)

    # gradients

    @cached_property
    def _largest_gradient(self) -> float:
        return max((row.largest for row in self.gradients), default=0.0)

    def scale(self, row: GradientRow) -> float:
        """What differences of a gradient are relative to."""
        return max(row.largest, KIND_SHARE * self._largest_gradient, MIN_SCALE)

    def relative(self, row: GradientRow) -> float:
        """The relative difference of a gradient; infinite where it is not a number."""
        found = row.difference / self.scale(row)
        return math.inf if math.isnan(found) else found

    def _spread(self, row: GradientRow) -> float:
        """Of the sum over all micro-batches, whose noise is independent, in relative terms."""
        return row.noise.largest * math.sqrt(self.num_units) / self.scale(row)

    @cached_property
    def _typical_spread(self) -> float:
        spreads = [self._spread(row) for row in self.gradients]
        return median(spreads) if spreads else 0.0

    def gradient_bound(self, row: GradientRow) -> float:
        """The largest relative difference of a gradient that rounding explains."""
        if self.types.is_exact:
            return max(TOLERANCE, FACTOR * self._spread(row))
        if self.num_terms is not None:
            return self._bound_without_noise(row, num_terms=self.num_terms)
        spread = max(self._spread(row), self._typical_spread)
        return FACTOR * spread + self._rounding_of_sums

    @property
    def _rounding_of_sums(self) -> float:
        """The rounding of the sums over micro-batches and ranks."""
        return (FLOOR + math.sqrt(self.num_units)) * self.types.eps

    def _bound_without_noise(self, row: GradientRow, *, num_terms: int) -> float:
        """Rounding of the sums alone; what differs by more is judged by noise."""
        if row.largest <= KIND_SHARE * self._largest_gradient:
            return ROUNDING_OF_ZERO
        return self._rounding_of_sums + norm_rounding(num_terms, self.types)

    def _projection_spread(self, row: GradientRow) -> float:
        """Relative change of a projection by noise: what was measured along the gradient, and what
        noise of that length has along any direction.
        """
        along = max(row.noise.along, row.noise.length / math.sqrt(max(row.num_entries, 1)))
        return along * math.sqrt(self.num_units) / max(math.sqrt(row.squared_norm), MIN_SCALE)

    @cached_property
    def _typical_projection_spread(self) -> float:
        spreads = [self._projection_spread(row) for row in self.gradients]
        return median(spreads) if spreads else 0.0

    def projection_bound(self, row: GradientRow) -> float:
        """The largest difference of a projection from 1 that rounding explains: errors of entries
        cancel, so it is far below the bound of an entry.
        """
        spread = max(self._projection_spread(row), self._typical_projection_spread)
        roundings = (FLOOR + math.sqrt(self.num_units)) / math.sqrt(max(row.num_entries, 1))
        return FACTOR * spread + roundings * self.types.eps

    def _has_close_projection(self, row: GradientRow) -> bool:
        """Whether the projection is compared, and a difference of two hundredths of it is seen."""
        return self._is_projected(row) and self.projection_bound(row) <= WIDE_PROJECTION

    def _is_projected(self, row: GradientRow) -> bool:
        """Whether the projection is compared: where the bound of entries hides faults. Elsewhere it
        would add nothing but the error of its own bound, which few numbers of noise stand for.
        """
        return row.is_product and row.parameter in self.wide and self._is_compared(row)

    def _projections(self) -> Iterator[LiveDifference]:
        for row in self.gradients:
            difference = abs(row.projection - 1)
            # Written so that NaN, which is within no bound, is a difference.
            if self._is_projected(row) and not difference <= self.projection_bound(row):
                yield LiveDifference(
                    f"{row.parameter} gradient",
                    block_of(row.parameter),
                    row.parameter,
                    "reduce",
                    f"{row.projection:.6g} times the right one along it",
                    difference,
                    self.projection_bound(row),
                )

    def _gradients(self) -> Iterator[LiveDifference]:
        for row in self.gradients:
            relative, bound = self.relative(row), self.gradient_bound(row)
            if self._is_compared(row) and not relative <= bound:
                yield LiveDifference(
                    f"{row.parameter} gradient",
                    block_of(row.parameter),
                    row.parameter,
                    "reduce",
                    f"different by {relative:.2g} of its largest entry",
                    relative,
                    bound,
                )

    def _all_gradients(self) -> Iterator[LiveDifference]:
        """Gradients that differ in an entry, then others that differ as a whole."""
        seen = set()
        for each in (*self._gradients(), *self._projections()):
            if each.parameter not in seen:
                seen.add(each.parameter)
                yield each

    # parameters, outputs, numbers

    def _parameters(self) -> Iterator[LiveDifference]:
        relations = {
            "not the initial value that the config defines": self.unlike_definition,
            "not the same on the ranks that hold copies of it": self.unequal,
        }
        for relation, names in relations.items():
            for name in names:
                yield LiveDifference(
                    f"{name} as used", block_of(name), name, "forward", relation, math.inf, 0.0
                )

    def _targets(self) -> Iterator[LiveDifference]:
        yield from self._number("number of targets", "batch", "targets", 0.0)

    def _loss(self) -> Iterator[LiveDifference]:
        bound = TOLERANCE
        spread = self.loss_spread
        if self.types.is_exact:
            bound = max(bound, FACTOR * spread)
        else:
            spread = max(spread, self._typical_spread)
            bound = FACTOR * spread + FLOOR * self.types.eps
        yield from self._number("loss", "loss", "loss", bound)

    def _norm(self) -> Iterator[LiveDifference]:
        bound = max(TOLERANCE, FACTOR * self._typical_spread)
        if not self.types.is_exact:
            most_entries = max((row.num_entries for row in self.gradients), default=1)
            bound += FLOOR * self.types.eps + norm_rounding(most_entries, self.types)
        yield from self._number("gradient norm", "norm", "norm", bound)

    def _number(
        self, title: str, phase: Phase, name: str, bound: float
    ) -> Iterator[LiveDifference]:
        measured, right = getattr(self.layout, name), getattr(self.plain, name)
        relative = abs(measured - right) / max(abs(right), MIN_SCALE)
        if relative <= bound:
            return
        ratio = measured / right if right else math.inf
        relation = f"{measured:.10g} in place of {right:.10g}, {ratio:.6g} times the right value"
        yield LiveDifference(title, "", "", phase, relation, relative, bound)

    def _outputs(self) -> Iterator[LiveDifference]:
        """The sequences of a block that differ, as one difference."""
        spreads = self.output_spread
        typical = median(spreads.values()) if spreads else 0.0
        for block in self.blocks:
            spread = max(spreads.get(block, 0.0), 0.0 if self.types.is_exact else typical)
            floor = TOLERANCE if self.types.is_exact else FLOOR * self.types.eps
            bound = FACTOR * spread + floor
            rows = [row for row in self._rows_of(block) if row.layout is not None]
            yield from self._missing(block, rows)
            wrong = {}
            for row in rows:
                assert row.layout is not None, "rows without one were left out"
                relative = abs(row.layout - row.plain) / max(row.size, MIN_SCALE)
                if not relative <= bound:
                    wrong[row.sequence] = relative
            if wrong:
                yield LiveDifference(
                    f"{block}.output",
                    block,
                    "",
                    "forward",
                    f"different in {_sequences_text(sorted(wrong), len(rows))}",
                    max(wrong.values()),
                    bound,
                )

    def _missing(self, block: str, rows: Sequence[OutputRow]) -> Iterator[LiveDifference]:
        """The sequences that did not go through a block, while others did."""
        seen = {row.sequence for row in rows}
        missing = sorted({row.sequence for row in self._rows_of(block)} - seen)
        # Where no rank has reported any sequence, the block was not watched: a note says so.
        if seen and missing:
            text = _sequences_text(missing, len(seen) + len(missing))
            yield LiveDifference(
                f"{block}.output", block, "", "forward", f"missing in {text}", math.inf, 0.0
            )

    def _rows_of(self, block: str) -> list[OutputRow]:
        return self._outputs_by_block.get(block, [])

    @cached_property
    def _outputs_by_block(self) -> dict[str, list[OutputRow]]:
        found: dict[str, list[OutputRow]] = {}
        for row in self.outputs:
            found.setdefault(row.block, []).append(row)
        return found

    # loads of experts

    def _loads(self) -> Iterator[LiveDifference]:
        for block, right in self.plain.loads.items():
            measured = self.layout.loads.get(block, ())
            if measured == right:
                continue
            moved = _num_moved(measured, right)
            yield LiveDifference(
                f"{block}.expert load",
                block,
                "",
                "forward",
                f"{list(measured)} in place of {list(right)}",
                moved / max(sum(right), 1),
                0.0,
            )

    @cached_property
    def _num_moved(self) -> float:
        """Tokens that the first block with another load has at other experts."""
        for block, right in self.plain.loads.items():
            measured = self.layout.loads.get(block, ())
            if measured != right:
                return _num_moved(measured, right)
        return 0.0

    @property
    def _is_rerouted_by_rounding(self) -> bool:
        """Whether so few tokens have another expert that rounding explains it; see `Judge`."""
        if self.types.is_exact:
            return False
        num_tokens = max((sum(load) for load in self.plain.loads.values()), default=0)
        most = MIN_REROUTED
        if self.types.has_16_bits:
            most = max(MOST_REROUTED * num_tokens, MIN_REROUTED)
        return self._num_moved <= most

    def _is_before(self, each: LiveDifference, routed: str) -> bool:
        """Whether a difference cannot follow from another routing in this block."""
        if each.phase == "batch" or each.tensor.endswith("as used"):
            return True
        return list(self.blocks).index(each.block) < list(self.blocks).index(routed)


def _num_moved(measured: Sequence[int], right: Sequence[int]) -> float:
    if len(measured) != len(right):
        return math.inf
    return sum(abs(one - other) for one, other in zip(measured, right, strict=True)) / 2


def _sequences_text(wrong: Sequence[int], total: int) -> str:
    if len(wrong) == total:
        return f"all {total} sequences" if total > 1 else "the sequence"
    shown = " ".join(map(str, wrong[:8]))
    more = " ..." if len(wrong) > 8 else ""
    return f"{len(wrong)} of {total} sequences of the step ({shown}{more})"
