"""Bounds of differences: 1e-9 in float64; else derived from perturbed runs of the one-device reference.

Note [Bounds]
    A layout adds the same terms in another order, and rounds at other places. How far that moves a
    tensor depends on the tensor, the step and the number types. So in float32 and 16 bits the
    reference runs again, with noise of one unit of the last place at every block boundary, and once
    at every module inside the blocks (where tensor parallelism rounds the parts of a sum), and with
    other micro-batches: each tensor may differ by FACTOR times as much as its perturbed versions, and by
    FLOOR units of rounding. Perturbed runs drift apart step by step, as layouts do, and the bound
    grows with them. In float64 nothing drifts in a few steps: the bound is 1e-9, but for tensors that
    optimizers of signs and ratios (Lion, Adafactor) make of rounding noise: a gradient that is zero
    in exact arithmetic. So there, too, perturbed runs are made for these, and one that draws the signs
    of such entries.

    A few perturbed runs are a small sample of a computation that magnifies rounding. Where all
    differences are within a few times their bounds, further runs are made, and all is compared
    again with what they say.

    Optimizers divide a gradient by its size, so the update of an entry depends on the relative
    rounding of its gradient, which is large where the gradient is small: an entry may move by a few
    learning rates times the bound of its gradient over its gradient. One whose gradient is smaller
    than its own bound may be updated either way. A matrix that starts at
    zero (the second factor of an adapter, a zero-initialised projection) consists of its updates
    alone, and all that it is multiplied with depends on their signs. How far that moves is measured
    as well: where there is such a matrix, one more perturbed run draws the signs of these entries.
    Rows that the first block looks up move as the entries of its tables do: see Note [Bounds of
    looked-up rows].

    A gradient norm adds the squares of all entries in an order of its own, which no perturbation of
    the gradients changes: the rounding of a sum of n terms grows like the root of n, up to the
    MOST_TERMS that are added with so few digits. NORM_SHARE times that, in units of rounding, is
    added to its bound, and to that of what gradients of this norm are scaled by: once to clipped
    gradients, twice to moments, the second of which consists of their squares.

A model that magnifies rounding, or casts to a coarse type, has bounds that hide faults. A tensor
whose bound is wider than WIDE_BOUND is compared, but does not count as such, and reports say so.

Differences are relative to the largest entry of the logical tensor, or to a share of the largest
entry of its kind: a gradient that is zero in exact arithmetic (the key bias of softmax attention)
consists of rounding errors and has no scale of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from weft.parallel.zero.grad_norm import LARGE_ENTRIES
from weft.prove.arithmetic import NumberTypes
from weft.prove.reference_trace import ReferenceTrace, TensorKey
from weft.prove.report import Phase

TOLERANCE = 1e-9
"""Relative, in float64, which rounds at 1e-16; a few steps of AdamW amplify that."""
FACTOR = 8.0
"""Tensor-parallel sums of n rounded parts err by sqrt(n) units, two perturbed runs are a small
sample, and the largest of many entries is compared."""
FLOOR = 4.0
NORM_SHARE = 0.25
"""Kernels add in several lanes, each a part of the terms."""
MOST_TERMS = LARGE_ENTRIES
NORM_FACTORS: Mapping[Phase, int] = {"norm": 1, "clip": 1, "moments": 2, "checkpoint": 2}
"""How often the factor that is made of the norm enters the tensors of a phase."""
MOST_RATES = 4.0
"""Learning rates by which AdamW may move an entry of two runs apart in a step."""
MIN_SCALE = 1e-30
REFERENCES = "references"
"""What of a batch is computed: log-probabilities of preference pairs under the reference model."""
KIND_SHARE = 1e-6
"""Least scale of a gradient or moment, as a share of the largest of its kind in the step."""
WIDE_BOUND = 0.01
"""A tensor within a wider bound does not count as compared: rounding in the model hides a fault."""
SMALL_SHARE = 1e-3
"""Share of the largest of its kind, up to which a gradient may be within any bound: one that is zero
in exact arithmetic consists of rounding."""


@dataclass(frozen=True)
class Bounds:
    """Scales and bounds of the tensors of a reference.

    Args:
        plain: the reference that the layout is compared with.
        perturbed: the same, perturbed.
        update_eps: to what an update is rounded within its optimizer; 0: as the parameters.
        free_outputs: how far each entry may move; see Note [Bounds of looked-up rows].
    """

    plain: ReferenceTrace
    perturbed: Sequence[ReferenceTrace]
    types: NumberTypes
    update_eps: float = 0.0
    free_outputs: Mapping[TensorKey, Tensor] = field(default_factory=dict)

    def scale(self, key: TensorKey) -> float:
        """What differences of this tensor are relative to."""
        own = self._largest[key]
        other = 0.0
        if key.phase in ("reduce", "clip", "moments", "backward"):
            kind = _Kind.of(key)
            other = KIND_SHARE * self._kind_scale.get(kind, 0.0)
        elif key.phase == "update" or key.tensor.endswith(" as used"):
            other = self._largest_lr
        return max(own, other, MIN_SCALE)

    def bound(self, key: TensorKey) -> float:
        """Largest relative difference that rounding explains."""
        found = self._bounds.get(key)
        if found is None:
            found = self._bound(key)
            self._bounds[key] = found
        return found

    def _bound(self, key: TensorKey) -> float:
        if key.phase == "batch" and key.tensor != REFERENCES:
            return 0.0
        spread = self._spreads[key]
        if self.types.is_exact:
            return max(TOLERANCE, FACTOR * spread)
        spread = max(spread, self._typical_spread(key))
        bound = FACTOR * spread + FLOOR * self.types.eps
        num_factors = NORM_FACTORS.get(key.phase, 0)
        bound += num_factors * norm_rounding(self._most_entries, self.types)
        if key.phase in ("update", "checkpoint"):
            rounding_of_update = self.update_eps * self._largest_lr
            bound += rounding_of_update / self.scale(key)
        return bound

    def is_wide(self, key: TensorKey) -> bool:
        """Whether a fault of more than a hundredth of the tensor may be within its bound."""
        own = self._largest[key]
        of_kind = self._kind_scale.get(_Kind.of(key), 0.0)
        return is_wide(self.bound(key), scale=self.scale(key), own=own, of_kind=of_kind)

    def relative(self, value: Tensor, expected: Tensor, key: TensorKey) -> float:
        """Largest difference of two tensors of this kind, relative to its scale."""
        return largest_difference(value, expected) / self.scale(key)

    def free_updates(self, parameter: str, step: int) -> Tensor | None:
        """For each entry of a parameter, how far rounding of its gradients in the steps so far may
        move its value; None where it has no gradient. See Note [Bounds].
        """
        share = self._rounding_share(parameter, step)
        if share is None:
            return None
        sum_of_rates = sum(lr for number, lr in self.plain.lrs.items() if number <= step)
        return MOST_RATES * sum_of_rates * share

    def _rounding_share(self, parameter: str, step: int) -> Tensor | None:
        """For each entry, the bound of its gradient over its gradient, at most 1: the largest of the
        steps so far, since moments keep what a step has left in them.
        """
        if self.types.is_exact or step < 1:
            return None
        place = (parameter, step)
        if place not in self._rounding_shares:
            earlier = self._rounding_share(parameter, step - 1)
            of_step = self._share_in_step(parameter, step)
            self._rounding_shares[place] = _larger(earlier, of_step)
        return self._rounding_shares[place]

    def _share_in_step(self, parameter: str, step: int) -> Tensor | None:
        found = self._gradient_and_bound(parameter, step)
        if found is None:
            return None
        gradient, bound = found
        size = gradient.double().abs().clamp(min=MIN_SCALE)
        return (bound / size).clamp(max=1)

    def small_gradient(self, parameter: str, step: int) -> Tensor | None:
        """The entries of a parameter whose clipped gradient is smaller than its own bound; None
        where it has none.
        """
        found = self._gradient_and_bound(parameter, step)
        if found is None:
            return None
        gradient, bound = found
        return gradient.abs() <= bound

    def _gradient_and_bound(self, parameter: str, step: int) -> tuple[Tensor, float] | None:
        """The clipped gradient of a parameter, and its bound in the units of the gradient."""
        key = TensorKey(step, "clip", f"{parameter} clipped gradient")
        gradient = self.plain.values.get(key)
        return None if gradient is None else (gradient, self.bound(key) * self.scale(key))

    @cached_property
    def _bounds(self) -> dict[TensorKey, float]:
        return {}

    @cached_property
    def _rounding_shares(self) -> dict[tuple[str, int], Tensor | None]:
        return {}

    @cached_property
    def _most_entries(self) -> int:
        """The number of entries of the largest gradient."""
        most = 1
        for key, tensor in self.plain.values.items():
            if key.phase == "reduce":
                most = max(most, tensor.numel())
        return most

    @cached_property
    def _spreads(self) -> dict[TensorKey, float]:
        found = {}
        for key in self.plain.values:
            if key.phase != "batch" or key.tensor == REFERENCES:
                found[key] = self._spread(key)
        return found

    def _spread(self, key: TensorKey) -> float:
        """Largest relative difference of a perturbed run."""
        whole = self.plain.values[key]
        if not whole.numel():
            return 0.0
        largest = 0.0
        for trace in self.perturbed:
            other = trace.values.get(key)
            if other is not None:
                largest = max(largest, self.relative(other, whole, key))
        return largest

    def _typical_spread(self, key: TensorKey) -> float:
        """The median over the tensors of the phase; numbers of a step take that of its gradients."""
        phase = key.phase
        if phase in ("loss", "norm", "clip", "evaluation"):
            phase = "reduce"
        return self._medians.get((key.step, phase), 0.0)

    @cached_property
    def _medians(self) -> dict[tuple[int, Phase], float]:
        spreads: dict[tuple[int, Phase], list[float]] = {}
        for key, spread in self._spreads.items():
            of_phase = spreads.setdefault((key.step, key.phase), [])
            of_phase.append(spread)
        medians = {}
        for place, found in spreads.items():
            found.sort()
            medians[place] = found[len(found) // 2]
        return medians

    @cached_property
    def _largest_lr(self) -> float:
        return max(self.plain.lrs.values(), default=0.0)

    @cached_property
    def _largest(self) -> dict[TensorKey, float]:
        found = {}
        for key, tensor in self.plain.values.items():
            found[key] = 0.0
            if tensor.numel():
                has_sizes = torch.promote_types(
                    tensor.dtype, torch.uint8
                )  # marks of pairs are bools
                found[key] = float(tensor.to(has_sizes).abs().max())
        return found

    @cached_property
    def _kind_scale(self) -> dict[_Kind, float]:
        """The largest entry of each kind in a step and phase."""
        found: dict[_Kind, float] = {}
        for key, largest in self._largest.items():
            kind = _Kind.of(key)
            largest_before = found.get(kind, 0.0)
            found[kind] = max(largest_before, largest)
        return found


def is_wide(bound: float, *, scale: float, own: float, of_kind: float) -> bool:
    """Whether a bound hides faults; see `WIDE_BOUND` and `SMALL_SHARE`.

    Args:
        scale: what the bound is relative to.
        own: the largest entry of the tensor.
        of_kind: the largest entry of its kind in the step.
    """
    return bound * scale > WIDE_BOUND * max(own, SMALL_SHARE * of_kind)


def wide_note(wide: Mapping[str, float], what: str) -> str:
    """Which tensors do not count as compared.

    Args:
        wide: tensor -> relative bound.
        what: "tensors", "gradients".
    """
    worst = max(wide, key=wide.__getitem__)
    return (
        f"not counted: {len(wide)} {what} with bounds above {100 * WIDE_BOUND:g}%, since rounding in "
        f"the model moves them as much ({worst}: {100 * wide[worst]:.2g}%)"
    )


def norm_rounding(num_entries: int, types: NumberTypes) -> float:
    """Rounding of the norm of so many entries, in relative terms; see Note [Bounds]."""
    num_terms = min(num_entries, MOST_TERMS)
    return NORM_SHARE * math.sqrt(num_terms) * types.eps


class _Kind(NamedTuple):
    """Tensors of one step and phase whose names end alike: "gradient", "exp_avg"."""

    step: int
    phase: Phase
    name: str

    @staticmethod
    def of(key: TensorKey) -> _Kind:
        name = key.tensor.rpartition(" ")[2]
        return _Kind(key.step, key.phase, name)


def _larger(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return torch.maximum(one, other)


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; infinite where shapes differ or a number is NaN."""
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    difference = one.double() - other.double()
    largest = float(difference.abs().max())
    return math.inf if math.isnan(largest) else largest
