"""Statistics of a fit: standard errors, residuals without a step and those alike, the range of predictions.

scipy is an extra, and so numpy is imported where it is used.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

OUTLIER = 0.03
"""Residual (logarithm of a ratio) above which a step counts less."""
LOG_STEP = 0.02
"""Change of a logarithm from which a derivative is taken: times have corners and are rounded."""
COVERED = 0.8
"""Share of measured times in the range of a prediction."""
NO_INFLUENCE = 1e-3
"""Largest change of a logarithm of a time by one of a constant below which it has no influence."""
LEAST_FREEDOM = 0.2
"""Of steps that almost alone decide a constant: their residual without them is at most five times as
large.
"""
COLLINEAR = 1e-9
"""Added to the diagonal of J'J, whose columns are normed: equal columns get large errors."""


@dataclass(frozen=True)
class FitErrors:
    """What is known of fitted numbers from the derivatives of the residuals.

    Attributes:
        of_numbers: standard errors; infinite for a number without influence.
        left_out: residual of each step, of a fit without its family.
    """

    of_numbers: list[float]
    left_out: list[float]


def fit_errors(
    jacobian: Any, residuals: Sequence[float], families: Sequence[str] = ()
) -> FitErrors:
    """Standard errors s^2 (J'WJ)^-1, where W are the weights of Cauchy's loss, and residuals of a fit
    without the step, r / (1 - h) with its leverage h; without a family of steps (I - H)^-1 r with
    the family's block of the hat matrix (Cook and Weisberg 1982).

    Args:
        jacobian: derivatives, one row a residual and one column a number.
        families: of each step; steps alike fail together. Default: each is its own.
    """
    import numpy as np

    errors = np.asarray(residuals)
    num_steps, num_numbers = jacobian.shape
    num_free = max(1, num_steps - num_numbers)
    weights = 1 / (1 + np.square(errors / OUTLIER))
    variance = (weights * np.square(errors)).sum() / num_free
    lengths = np.sqrt(weights @ np.square(jacobian))
    has_influence = lengths > NO_INFLUENCE
    normed = jacobian / np.where(has_influence, lengths, 1.0)
    information = normed.T @ (weights[:, None] * normed)
    inverse = np.linalg.inv(information + COLLINEAR * np.eye(num_numbers))
    deviations = np.sqrt(np.maximum(0.0, variance * np.diag(inverse)))
    of_numbers = np.where(has_influence, deviations / np.maximum(lengths, NO_INFLUENCE), math.inf)
    roots = np.sqrt(weights)
    weighted = roots[:, None] * normed
    left_out = np.empty(num_steps)
    for places in _places_of_families(families, num_steps):
        own = weighted[places]
        hat = own @ inverse @ own.T
        left_out[places] = _without(hat, roots[places] * errors[places]) / roots[places]
    return FitErrors(of_numbers.tolist(), left_out.tolist())


def _places_of_families(families: Sequence[str], num_steps: int) -> list[list[int]]:
    if not families:
        return [[place] for place in range(num_steps)]
    found: dict[str, list[int]] = {}
    for place, family in enumerate(families):
        found.setdefault(family, []).append(place)
    return list(found.values())


def _without(hat: Any, errors: Any) -> Any:
    """Residuals of a family in a fit without it."""
    import numpy as np

    leverages, directions = np.linalg.eigh(hat)
    freedoms = np.maximum(1 - leverages, LEAST_FREEDOM)
    along = directions.T @ errors
    return directions @ (along / freedoms)


def derivatives(
    function: Callable[[Sequence[float]], list[float]],
    logs: Sequence[float],
    *,
    before: Sequence[float],
    highest: Sequence[float],
) -> Any:
    """Derivatives of a function by each logarithm, one column each, from a step that stays below
    the upper bound.

    Args:
        before: the function there.
    """
    import numpy as np

    columns = []
    for place, log in enumerate(logs):
        is_inside = log + LOG_STEP <= highest[place]
        step = LOG_STEP if is_inside else -LOG_STEP
        changed = [*logs[:place], log + step, *logs[place + 1 :]]
        after = np.asarray(function(changed))
        columns.append((after - np.asarray(before)) / step)
    if not columns:
        return np.empty((len(before), 0))
    return np.stack(columns, axis=1)


def ratio_range(ratios: Sequence[float], families: Sequence[str] = ()) -> tuple[float, float]:
    """The range of measured over predicted times that holds 80% of those of other steps: n ratios
    divide the line into n + 1 parts, and the next one lies in each of them with the same probability
    (conformal prediction: Vovk et al. 2005). Steps of a family fail together, and another step may
    be of another family: the range also holds 80% where each family counts as one (Lee, Barber and
    Willett 2023).

    Args:
        ratios: of steps that were not fitted, or as if they had not been.
        families: of each step; default: each is its own.
    """
    places = [str(place) for place in range(len(ratios))]
    by_step = _weighted_range(ratios, places)
    by_family = _weighted_range(ratios, families or places)
    low = min(by_step[0], by_family[0], 1.0)
    high = max(by_step[1], by_family[1], 1.0)
    return low, high


def _weighted_range(ratios: Sequence[float], families: Sequence[str]) -> tuple[float, float]:
    """The range where each family counts as one."""
    tail = (1 - COVERED) / 2
    sizes = Counter(families)
    part = 1 / (len(sizes) + 1)
    points = []
    for ratio, family in zip(ratios, families, strict=True):
        points.append((ratio, part / sizes[family]))
    points.sort()
    low = _beyond(points, tail)
    high = _beyond(points[::-1], tail)
    return low, high


def _beyond(points: Sequence[tuple[float, float]], tail: float) -> float:
    """The value before which, in this order, points with this sum of weights lie; between
    neighbours in proportion.
    """
    before, total = points[0][0], 0.0
    for value, weight in points:
        if total + weight >= tail:
            share = (tail - total) / weight if total else 1.0
            return before + share * (value - before)
        before = value
        total += weight
    return before


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, between neighbours in proportion."""
    last = len(values) - 1
    return _between(values, 1 + share * last)


def _between(values: Sequence[float], place: float) -> float:
    """The value at a place, counted from 1 in ascending order, between neighbours in proportion."""
    ordered = sorted(values)
    inside = min(max(place, 1.0), len(ordered))
    below = math.floor(inside)
    lower = ordered[below - 1]
    upper = ordered[min(below, len(ordered) - 1)]
    return lower + (inside - below) * (upper - lower)
