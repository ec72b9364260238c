"""Fit of a device's constants (`Efficiency`) to measured steps, with their uncertainty and the range of predictions.

Note [Fit]
    The fit minimizes the logarithms of predicted over measured seconds, so that a run of
    milliseconds counts as much as one of minutes, and an outlier next to nothing (Cauchy's loss:
    some published times are twice those of their neighbours, and a machine may be disturbed).
    Predictions are those of `step_time`: there is no second model. Constants are fitted as
    logarithms within physical bounds. Uncertainties are standard errors of these logarithms from
    the Gauss-Newton covariance. While some constant has a standard error above `UNDETERMINED`, the
    one with the largest goes back to its start value, and the others are fitted again: so every
    fitted constant is determined by the runs, and no other constant has moved. The range `low` to
    `high` holds 80% of measured over predicted times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weft.config.efficiency import Efficiency
from weft.config.hardware import Hardware
from weft.errors import Fault, PlanError, WeftError
from weft.planner.condensed import Condenser
from weft.planner.measure import RoleCosts
from weft.planner.pipeline_time import PipelineOrder, pipeline_order
from weft.planner.speeds import Speeds
from weft.planner.step_time import step_seconds

BOUNDS: Mapping[str, tuple[float, float]] = {
    "gemm": (1e-4, 1.0),
    "gemm_half": (1.0, 1e8),
    "attention": (1e-4, 1.0),
    "score_bytes": (0.1, 100.0),
    "memory": (1e-3, 3.0),
    "launch_s": (1e-8, 1e-2),
    "link": (1e-4, 1.0),
    "network": (1e-4, 1.0),
    "latency_s": (1e-8, 0.1),
    "network_latency_s": (1e-8, 0.1),
    "overlap_slowdown": (1e-3, 1.0),
}
"""Constants that are fitted, with their bounds. Those that start at 0 are left there."""

SCALE_BOUNDS = (0.2, 5.0)
OUTLIER = 0.03
"""Residual (logarithm of a ratio) above which a step counts less."""
PULL = 0.01
"""Residual of a constant that is e times its start: what runs say must be stronger."""
SETTLED = 1e-3
"""Relative change of the constants at which the fit ends."""
MOST_EVALUATIONS = 15
LOG_STEP = 0.02
"""Change of a logarithm from which a derivative is taken: times have corners and are rounded."""
COVERED = 0.8
"""Share of measured times in the range of a prediction."""
UNDETERMINED = math.log(2)
"""Standard error of the logarithm of a constant above which the runs do not determine it."""
NO_INFLUENCE = 1e-3
"""Largest change of a logarithm of a time by one of a constant below which it has no influence."""

TRIED_SHARE = 0.8
"""Of a constant: how much less of it is tried."""
LEAST_FREEDOM = 0.2
"""Of a step that almost alone decides a constant: its residual without it is at most five times as
large.
"""
COLLINEAR = 1e-9
"""Added to the diagonal of J'J, whose columns are normed: equal columns get large errors."""


@dataclass(frozen=True)
class MeasuredStep:
    """A run's step: its counted work and its measured time.

    Attributes:
        name: of the run, for the reader.
        roles: one a pipeline coordinate, from `measure`.
        seconds: of a step.
        group: steps of one group have a free scale in common; "": none.
    """

    name: str
    roles: tuple[RoleCosts, ...]
    seconds: float
    group: str = ""

    @cached_property
    def order(self) -> PipelineOrder:
        """Of its schedule."""
        return pipeline_order(self.roles[0].step.plan.table)


@dataclass(frozen=True)
class Residual:
    """A measured step beside its prediction, seconds."""

    name: str
    measured_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Measured over predicted."""
        return self.measured_s / self.predicted_s

    @property
    def error(self) -> float:
        """Of the prediction, as a share of the measured time; positive: too slow."""
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True)
class Calibration:
    """Fitted constants.

    Attributes:
        efficiency: the constants, and the range of predictions.
        uncertainty: standard error of each constant that has an influence, as a share of it;
            infinite where the runs do not determine it, and it has the value that it started from.
        residuals: of the steps that were fitted.
        scales: of each group: measured times of its steps are so many times longer.
    """

    efficiency: Efficiency
    uncertainty: Mapping[str, float]
    residuals: tuple[Residual, ...]
    scales: Mapping[str, float]

    @property
    def range(self) -> tuple[float, float]:
        """The range of measured over predicted times."""
        return self.efficiency.low, self.efficiency.high

    @property
    def median_error(self) -> float:
        """Of the predictions, as a share of the measured times."""
        return quantile([abs(residual.error) for residual in self.residuals], 0.5)


def fit(
    steps: Sequence[MeasuredStep],
    hardware: Hardware,
    *,
    source: str,
    start: Efficiency | None = None,
) -> Calibration:
    """Fit the constants of a device to measured steps; see Note [Fit].

    Args:
        source: what they are fitted to.
        start: constants to start from; those that are 0 are not fitted.

    Raises:
        PlanError: fewer steps than constants that matter, or a time that is not positive.
        WeftError: scipy is not installed.
    """
    _check_steps(steps)
    least_squares = _least_squares()
    problem = _StepResiduals(condensed(steps), hardware, start or Efficiency())
    names = problem.constants_that_matter()
    num_free = len(names) + len(problem.groups)
    if len(steps) <= num_free:
        need = f"more than the {num_free} constants that are fitted"
        raise PlanError(Fault("calibrate", "too few runs", f"{len(steps)}", need))
    uncertainty = dict.fromkeys(names, math.inf)
    logs = problem.start_logs(names)
    while True:
        logs = problem.solved(names, logs, least_squares)
        found = problem.errors(names, logs)
        errors = found.of_numbers[: len(names)]
        if max(errors, default=0.0) < UNDETERMINED:
            break
        worst = errors.index(max(errors))
        names = names[:worst] + names[worst + 1 :]
        logs = logs[:worst] + logs[worst + 1 :]
    uncertainty.update(zip(names, errors, strict=True))
    constants, scales = problem.values(names, logs)
    compared = compare(problem.steps, hardware, constants, scales=scales)
    lowest, highest = ratio_range([math.exp(-error) for error in found.left_out])
    return Calibration(
        efficiency=replace(constants, source=source, low=lowest, high=highest),
        uncertainty=uncertainty,
        residuals=compared,
        scales=scales,
    )


def condensed(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """The steps in a form that is predicted several times as fast."""
    condenser = Condenser()
    return [replace(step, roles=condenser.roles(step.roles)) for step in steps]


def compare(
    steps: Sequence[MeasuredStep],
    hardware: Hardware,
    constants: Efficiency,
    *,
    scales: Mapping[str, float] | None = None,
) -> tuple[Residual, ...]:
    """Measured steps beside their predictions."""
    predicted = predict_all(steps, hardware, constants, scales or {})
    residuals = []
    for step, seconds in zip(steps, predicted, strict=True):
        residuals.append(Residual(step.name, step.seconds, seconds))
    return tuple(residuals)


def predict_all(
    steps: Sequence[MeasuredStep],
    hardware: Hardware,
    constants: Efficiency,
    scales: Mapping[str, float],
) -> list[float]:
    """The predicted seconds of each step."""
    speeds = Speeds(hardware.with_efficiency(constants))
    predicted = []
    for step in steps:
        seconds = step_seconds(step.roles, speeds, order=step.order)
        predicted.append(seconds * scales.get(step.group, 1.0))
    return predicted


def ratio_range(ratios: Sequence[float]) -> tuple[float, float]:
    """The range of measured over predicted times that holds 80% of those of other steps: n ratios
    divide the line into n + 1 parts, and the next one lies in each of them with the same probability
    (conformal prediction: Vovk et al. 2005).

    Args:
        ratios: of steps that were not fitted, or as if they had not been.
    """
    tail = (1 - COVERED) / 2
    low = _between(ratios, (len(ratios) + 1) * tail)
    high = _between(ratios, (len(ratios) + 1) * (1 - tail))
    return min(low, 1.0), max(high, 1.0)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, between neighbours in proportion."""
    return _between(values, 1 + share * (len(values) - 1))


def _between(values: Sequence[float], place: float) -> float:
    """The value at a place, counted from 1 in ascending order, between neighbours in proportion."""
    ordered = sorted(values)
    inside = min(max(place, 1.0), len(ordered))
    below = math.floor(inside)
    lower = ordered[below - 1]
    upper = ordered[min(below, len(ordered) - 1)]
    return lower + (inside - below) * (upper - lower)


def _check_steps(steps: Sequence[MeasuredStep]) -> None:
    for step in steps:
        is_time = math.isfinite(step.seconds) and step.seconds > 0
        if not is_time:
            what = f"{step.name} has no time"
            raise PlanError(Fault("calibrate", what, f"{step.seconds} s"))


def _least_squares() -> Callable[..., Any]:
    try:
        from scipy.optimize import least_squares
    except ImportError:
        fix = 'pip install "weft-train[plan]"'
        raise WeftError(str(Fault("calibrate", "scipy is not installed", fix=fix))) from None
    return least_squares  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FitErrors:
    """What is known of fitted numbers from the derivatives of the residuals.

    Attributes:
        of_numbers: standard errors; infinite for a number without influence.
        left_out: residual of each step, of a fit without that step.
    """

    of_numbers: list[float]
    left_out: list[float]


def fit_errors(jacobian: Any, residuals: Sequence[float]) -> FitErrors:
    """Standard errors s^2 (J'WJ)^-1, where W are the weights of Cauchy's loss, and residuals without a
    step, r / (1 - h) with its leverage h (Cook and Weisberg 1982).

    Args:
        jacobian: derivatives, one row a residual and one column a number.
    """
    import numpy as np  # scipy's, which is an extra

    errors = np.asarray(residuals)
    num_steps, num_numbers = jacobian.shape
    num_free = max(1, num_steps - num_numbers)
    weights = 1 / (1 + np.square(errors / OUTLIER))
    squares = weights * np.square(errors)
    variance = squares.sum() / num_free
    lengths = np.sqrt(weights @ np.square(jacobian))
    has_influence = lengths > NO_INFLUENCE
    normed = jacobian / np.where(has_influence, lengths, 1.0)
    information = normed.T @ (weights[:, None] * normed)
    inverse = np.linalg.inv(information + COLLINEAR * np.eye(num_numbers))
    deviations = np.sqrt(np.maximum(0.0, variance * np.diag(inverse)))
    of_numbers = np.where(has_influence, deviations / np.maximum(lengths, NO_INFLUENCE), math.inf)
    leverages = weights * np.einsum("ij,jk,ik->i", normed, inverse, normed)
    left_out = errors / np.maximum(1 - leverages, LEAST_FREEDOM)
    return FitErrors(of_numbers.tolist(), left_out.tolist())


class _StepResiduals:
    """Residuals of measured steps, and their derivatives, by the logarithms of named constants and
    then of the scales of all groups.
    """

    def __init__(
        self, steps: Sequence[MeasuredStep], hardware: Hardware, start: Efficiency
    ) -> None:
        self.steps = steps
        self.hardware = hardware
        self.start = start
        self.groups = sorted({step.group for step in steps if step.group})

    def constants_that_matter(self) -> list[str]:
        """Constants on which the times depend."""
        before = self._log_times(self.start, {})
        least = NO_INFLUENCE * abs(math.log(TRIED_SHARE))
        names = []
        for name in BOUNDS:
            value = getattr(self.start, name)
            if not value:
                continue
            changed = replace(self.start, **{name: TRIED_SHARE * value})
            after = self._log_times(changed, {})
            changes = [abs(a - b) for a, b in zip(after, before, strict=True)]
            if max(changes) > least:
                names.append(name)
        return names

    def start_logs(self, names: Sequence[str]) -> list[float]:
        """Where the fit starts, without respect to bounds."""
        constants = [math.log(getattr(self.start, name)) for name in names]
        return constants + [0.0] * len(self.groups)

    def values(
        self, names: Sequence[str], logs: Sequence[float]
    ) -> tuple[Efficiency, dict[str, float]]:
        """The constants and scales of these logarithms."""
        exponentials = [math.exp(log) for log in logs]
        fitted: dict[str, Any] = dict(zip(names, exponentials, strict=False))
        of_groups = exponentials[len(names) :]
        scales = dict(zip(self.groups, of_groups, strict=True))
        return replace(self.start, **fitted), scales

    def solved(
        self, names: Sequence[str], logs: Sequence[float], least_squares: Callable[..., Any]
    ) -> list[float]:
        """The logarithms that fit the steps best, from these on."""
        origin = self.start_logs(names)
        lowest, highest = self._log_bounds(names)
        inside = []
        for log, low, high in zip(logs, lowest, highest, strict=True):
            inside.append(min(max(log, low), high))

        def residuals(logs: Sequence[float]) -> list[float]:
            found = self._residuals(names, logs)
            for log, at in zip(logs, origin, strict=True):
                found.append(PULL * (log - at))
            return found

        def jacobian(logs: Sequence[float]) -> Any:
            return derivatives(residuals, logs, highest)

        found = least_squares(
            residuals,
            inside,
            jac=jacobian,
            bounds=(lowest, highest),
            loss="cauchy",
            f_scale=OUTLIER,
            xtol=SETTLED,
            ftol=SETTLED,
            max_nfev=MOST_EVALUATIONS,
        )
        logs_found: list[float] = found.x.tolist()
        return logs_found

    def errors(self, names: Sequence[str], logs: Sequence[float]) -> FitErrors:
        """Of these logarithms, from the steps alone, without the pull."""
        _, highest = self._log_bounds(names)

        def residuals(logs: Sequence[float]) -> list[float]:
            return self._residuals(names, logs)

        jacobian = derivatives(residuals, logs, highest)
        return fit_errors(jacobian, residuals(logs))

    def _log_bounds(self, names: Sequence[str]) -> tuple[list[float], list[float]]:
        bounds = [BOUNDS[name] for name in names]
        bounds += [SCALE_BOUNDS] * len(self.groups)
        lowest = [math.log(low) for low, _ in bounds]
        highest = [math.log(high) for _, high in bounds]
        return lowest, highest

    def _residuals(self, names: Sequence[str], logs: Sequence[float]) -> list[float]:
        constants, scales = self.values(names, logs)
        predicted = self._log_times(constants, scales)
        found = []
        for log, step in zip(predicted, self.steps, strict=True):
            found.append(log - math.log(step.seconds))
        return found

    def _log_times(self, constants: Efficiency, scales: Mapping[str, float]) -> list[float]:
        predicted = predict_all(self.steps, self.hardware, constants, scales)
        return [math.log(seconds) for seconds in predicted]


def derivatives(
    function: Callable[[Sequence[float]], list[float]],
    logs: Sequence[float],
    highest: Sequence[float],
) -> Any:
    """Derivatives of a function by each logarithm, one column each, from a step that stays below
    the upper bound.
    """
    import numpy as np  # scipy's, which is an extra

    before = np.asarray(function(logs))
    columns = []
    for place, log in enumerate(logs):
        is_inside = log + LOG_STEP <= highest[place]
        step = LOG_STEP if is_inside else -LOG_STEP
        changed = [*logs[:place], log + step, *logs[place + 1 :]]
        after = np.asarray(function(changed))
        columns.append((after - before) / step)
    return np.stack(columns, axis=1)
