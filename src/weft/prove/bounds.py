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
    in exact arithmetic. So there, too, perturbed runs are made for these.

    The sign of an update is that of its gradient, however small: an entry whose gradient is smaller
    than its own bound may be updated either way, by a few learning rates. A matrix that starts at
    zero (the second factor of an adapter, a zero-initialised projection) consists of its updates
    alone, and all that it is multiplied with depends on their signs. How far that moves is measured
    as well: where there is such a matrix, one more perturbed run draws the signs of these entries.

    A gradient norm adds the squares of all entries in an order of its own, which no perturbation of
    the gradients changes: the rounding of a sum of n terms grows like the root of n. NORM_SHARE
    times that, in units of rounding, is added to its bound.

Differences are relative to the largest entry of the logical tensor, or to a share of the largest
entry of its kind: a gradient that is zero in exact arithmetic (the key bias of softmax attention)
consists of rounding errors and has no scale of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

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
MOST_RATES = 4.0
"""Learning rates by which AdamW may move two runs apart in a step."""
MIN_SCALE = 1e-30
KIND_SHARE = 1e-6
"""Least scale of a gradient or moment, as a share of the largest of its kind in the step."""


@dataclass(frozen=True)
class Bounds:
    """Scales and bounds of the tensors of a reference.

    Args:
        plain: the reference that the layout is compared with.
        perturbed: the same, perturbed.
        update_eps: to what an update is rounded within its optimizer; 0: as the parameters.
    """

    plain: ReferenceTrace
    perturbed: Sequence[ReferenceTrace]
    types: NumberTypes
    update_eps: float = 0.0

    def scale(self, key: TensorKey) -> float:
        """What differences of this tensor are relative to."""
        own = self._largest[key]
        if key.phase in ("reduce", "clip", "moments", "backward"):
            kind = self._kind_scale.get((key.step, key.phase, _kind(key)), 0.0)
            return max(own, KIND_SHARE * kind, MIN_SCALE)
        if key.phase == "update" or key.tensor.endswith(" as used"):
            return max(own, self._largest_lr, MIN_SCALE)
        return max(own, MIN_SCALE)

    def bound(self, key: TensorKey) -> float:
        """Largest relative difference that rounding explains."""
        found = self._bounds.get(key)
        if found is None:
            found = self._bound(key)
            self._bounds[key] = found
        return found

    def _bound(self, key: TensorKey) -> float:
        if key.phase == "batch":
            return 0.0
        if self.types.is_exact:
            return max(TOLERANCE, FACTOR * self._spreads[key])
        spread = max(self._spreads[key], self._typical_spread(key))
        bound = FACTOR * spread + FLOOR * self.types.eps
        if key.phase in ("norm", "clip"):
            bound += norm_rounding(self._most_entries, self.types)
        if key.phase in ("update", "checkpoint"):
            bound += self.update_eps * self._largest_lr / self.scale(key)
        return bound

    def relative(self, value: Tensor, expected: Tensor, key: TensorKey) -> float:
        """Largest difference of two tensors of this kind, relative to its scale."""
        return largest_difference(value, expected) / self.scale(key)

    def undetermined(self, parameter: str, step: int) -> Tensor | None:
        """The entries of a parameter whose gradients were smaller than their own bound in a step so
        far: rounding decides the sign of their updates. None where there are none.
        """
        if self.types.is_exact or step < 1:
            return None
        place = (parameter, step)
        if place not in self._undetermined:
            earlier = self.undetermined(parameter, step - 1)
            small = self.small_gradient(parameter, step)
            parts = [mask for mask in (earlier, small) if mask is not None]
            self._undetermined[place] = torch.stack(parts).any(0) if parts else None
        return self._undetermined[place]

    def small_gradient(self, parameter: str, step: int) -> Tensor | None:
        """The entries of a parameter whose clipped gradient is smaller than its own bound; None
        where it has none.
        """
        key = TensorKey(step, "clip", f"{parameter} clipped gradient")
        gradient = self.plain.values.get(key)
        if gradient is None:
            return None
        return gradient.abs() <= self.bound(key) * self.scale(key)

    def largest_updates(self, step: int) -> float:
        """Of one entry, summed over the steps so far."""
        return MOST_RATES * sum(lr for number, lr in self.plain.lrs.items() if number <= step)

    @cached_property
    def _bounds(self) -> dict[TensorKey, float]:
        return {}

    @cached_property
    def _undetermined(self) -> dict[tuple[str, int], Tensor | None]:
        return {}

    @cached_property
    def _most_entries(self) -> int:
        """Of a gradient."""
        sizes = (x.numel() for key, x in self.plain.values.items() if key.phase == "reduce")
        return max(sizes, default=1)

    @cached_property
    def _spreads(self) -> dict[TensorKey, float]:
        return {key: self._spread(key) for key in self.plain.values if key.phase != "batch"}

    def _spread(self, key: TensorKey) -> float:
        whole = self.plain.values[key]
        scale = self.scale(key)
        largest = 0.0
        for trace in self.perturbed:
            other = trace.values.get(key)
            if other is not None and whole.numel():
                largest = max(largest, largest_difference(other, whole) / scale)
        return largest

    def _typical_spread(self, key: TensorKey) -> float:
        """The median over the tensors of the phase; numbers of a step take that of its gradients."""
        phase: Phase = (
            "reduce" if key.phase in ("loss", "norm", "clip", "evaluation") else key.phase
        )
        return self._medians.get((key.step, phase), 0.0)

    @cached_property
    def _medians(self) -> dict[tuple[int, Phase], float]:
        spreads: dict[tuple[int, Phase], list[float]] = {}
        for key, spread in self._spreads.items():
            spreads.setdefault((key.step, key.phase), []).append(spread)
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
            found[key] = float(tensor.abs().max()) if tensor.numel() else 0.0
        return found

    @cached_property
    def _kind_scale(self) -> dict[tuple[int, Phase, str], float]:
        found: dict[tuple[int, Phase, str], float] = {}
        for key, largest in self._largest.items():
            kind = (key.step, key.phase, _kind(key))
            largest_before = found.get(kind, 0.0)
            found[kind] = max(largest_before, largest)
        return found


def norm_rounding(num_entries: int, types: NumberTypes) -> float:
    """Rounding of the norm of so many entries, in relative terms; see Note [Bounds]."""
    return NORM_SHARE * math.sqrt(num_entries) * types.eps


def _kind(key: TensorKey) -> str:
    """What follows the name of the parameter or block: "gradient", "exp_avg"."""
    return key.tensor.rpartition(" ")[2]


def largest_difference(one: Tensor, other: Tensor) -> float:
    """Largest absolute difference; infinite where shapes differ or a number is NaN."""
    if one.shape != other.shape:
        return math.inf
    if not one.numel():
        return 0.0
    difference = float((one.double() - other.double()).abs().max())
    return math.inf if math.isnan(difference) else difference
