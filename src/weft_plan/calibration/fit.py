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
    `high` holds 80% of measured over predicted times of steps that were not fitted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from weft.config.efficiency import Efficiency
from weft.config.hardware import Hardware
from weft.errors import Fault, PlanError, WeftError
from weft_plan.calibration.fit_statistics import (
    NO_INFLUENCE,
    OUTLIER,
    FitErrors,
    derivatives,
    fit_errors,
    quantile,
    ratio_range,
)
from weft_plan.calibration.measured_steps import (
    MeasuredStep,
    Residual,
    compare,
    condensed,
    predict_all,
)

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
PULL = 0.01
"""Residual of a constant that is e times its start: what runs say must be stronger."""
SETTLED = 5e-3
"""Change of the logarithms at which the fit ends."""
LARGEST_STEP = 1.0
"""Change of a logarithm by one linearization."""
LEAST_STEP = 1e-9
MOST_LINEARIZATIONS = 10
UNDETERMINED = math.log(2)
"""Standard error of the logarithm of a constant above which the runs do not determine it."""
TRIED_SHARE = 0.8
"""Of a constant: how much less of it is tried."""


@dataclass(frozen=True)
class Calibration:
    """The constants that were fitted to measurements.

    Attributes:
        efficiency: the constants, and the range of predictions.
        uncertainty: standard error of each constant that has an influence, as a share of it;
            infinite where the runs do not determine it, and it has the value that it started from.
        residuals: of the steps that were fitted.
        left_out: measured over predicted times of these steps, as if their families had not been
            fitted.
        scales: of each group: measured times of its steps are so many times longer.
    """

    efficiency: Efficiency
    uncertainty: Mapping[str, float]
    residuals: tuple[Residual, ...]
    left_out: tuple[float, ...]
    scales: Mapping[str, float]

    @property
    def range(self) -> tuple[float, float]:
        """The range of measured over predicted times."""
        return self.efficiency.low, self.efficiency.high

    @property
    def median_error(self) -> float:
        """Of the predictions, as a share of the measured times."""
        errors = [abs(residual.error) for residual in self.residuals]
        return quantile(errors, 0.5)


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
    _check_times(steps)
    least_squares = _least_squares()
    problem = _StepResiduals(condensed(steps), hardware, start or Efficiency())
    names = problem.constants_that_matter()
    _check_number(steps, num_free=len(names) + len(problem.groups))
    uncertainty = dict.fromkeys(names, math.inf)
    logs = problem.start_logs(names)
    while True:
        solution = problem.solved(names, logs, least_squares)
        logs, tangent = solution.logs, solution.tangent
        determined = tangent.determined(num_constants=len(names))
        if len(determined) == len(names):
            break
        scales = range(len(names), len(logs))
        logs = [logs[place] for place in (*determined, *scales)]
        names = [names[place] for place in determined]
    errors = tangent.errors()
    uncertainty.update(zip(names, errors.of_numbers, strict=False))
    constants, scales_of_groups = problem.values(names, logs)
    left_out = tuple(math.exp(-error) for error in errors.left_out)
    lowest, highest = ratio_range(left_out, tangent.families)
    return Calibration(
        efficiency=replace(constants, source=source, low=lowest, high=highest),
        uncertainty=uncertainty,
        residuals=compare(problem.steps, hardware, constants, scales=scales_of_groups),
        left_out=left_out,
        scales=scales_of_groups,
    )


def _check_times(steps: Sequence[MeasuredStep]) -> None:
    for step in steps:
        is_time = math.isfinite(step.seconds) and step.seconds > 0
        if not is_time:
            what = f"{step.name} has no time"
            raise PlanError(Fault("calibrate", what, f"{step.seconds} s"))


def _check_number(steps: Sequence[MeasuredStep], *, num_free: int) -> None:
    if len(steps) <= num_free:
        need = f"more than the {num_free} constants that are fitted"
        raise PlanError(Fault("calibrate", "too few runs", f"{len(steps)}", need))


def _least_squares() -> Callable[..., Any]:
    try:
        from scipy.optimize import least_squares
    except ImportError:
        fix = 'pip install "weft-train[plan]"'
        raise WeftError(str(Fault("calibrate", "scipy is not installed", fix=fix))) from None
    return least_squares  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Tangent:
    """Residuals of a solution and their derivatives.

    Attributes:
        jacobian: one row a step, one column a number: the constants, then the scales.
        families: of each step.
    """

    jacobian: Any
    residuals: Sequence[float]
    families: Sequence[str]

    def errors(self, columns: Sequence[int] | None = None) -> FitErrors:
        """Of the fit of all numbers, or of some of them."""
        jacobian = self.jacobian if columns is None else self.jacobian[:, list(columns)]
        return fit_errors(jacobian, self.residuals, self.families)

    def determined(self, *, num_constants: int) -> list[int]:
        """Places of the constants that are left when, one after another, the one with the largest
        error above UNDETERMINED is not fitted.
        """
        num_numbers = self.jacobian.shape[1]
        scales = range(num_constants, num_numbers)
        places = list(range(num_constants))
        while places:
            errors = self.errors([*places, *scales]).of_numbers[: len(places)]
            largest = max(errors)
            if largest < UNDETERMINED:
                break
            del places[errors.index(largest)]
        return places


@dataclass(frozen=True)
class _Solution:
    """Logarithms that fit the steps best, with the tangent there."""

    logs: list[float]
    tangent: _Tangent


def _linear_residuals(step: Any, *, rows: Any, at_now: Any) -> Any:
    """After a step, as if residuals were linear."""
    return at_now + rows @ step


def _linear_derivatives(_step: Any, *, rows: Any) -> Any:
    return rows


def _step_bounds(now: Any, lowest: Sequence[float], highest: Sequence[float]) -> tuple[Any, Any]:
    """How far each logarithm may go; a little more than none, as least_squares wants."""
    import numpy as np

    room_below = np.asarray(lowest) - now
    room_above = np.asarray(highest) - now
    down = np.clip(room_below, -LARGEST_STEP, -LEAST_STEP)
    up = np.clip(room_above, LEAST_STEP, LARGEST_STEP)
    return down, up


def _loss(residuals: Sequence[float], moved: Any) -> float:
    """Cauchy's loss of the residuals and of the pull to the start."""
    import numpy as np

    every = np.concatenate([residuals, PULL * moved])
    return float(np.log1p(np.square(every / OUTLIER)).sum())


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
        """The constants, within their bounds, and scales of these logarithms. The last step of a fit
        may end a little beyond a bound (`_step_bounds`).
        """
        exponentials = [math.exp(log) for log in logs]
        fitted: dict[str, Any] = {}
        for name, value in zip(names, exponentials, strict=False):
            low, high = BOUNDS[name]
            fitted[name] = min(max(value, low), high)
        of_groups = exponentials[len(names) :]
        scales = dict(zip(self.groups, of_groups, strict=True))
        return replace(self.start, **fitted), scales

    def solved(
        self, names: Sequence[str], logs: Sequence[float], least_squares: Callable[..., Any]
    ) -> _Solution:
        """The logarithms that fit the steps best, from these on. Each linearization costs as many
        predictions as there are numbers, so it is solved to its end, within LARGEST_STEP.
        """
        import numpy as np

        origin = np.asarray(self.start_logs(names))
        lowest, highest = self._log_bounds(names)
        pull = PULL * np.eye(len(origin))
        now: Any = np.clip(logs, lowest, highest)
        residuals = self._residuals(names, now)
        for _ in range(MOST_LINEARIZATIONS):
            tangent = self._tangent(names, now, residuals, highest)
            if not now.size:
                break
            rows = np.concatenate([tangent.jacobian, pull])
            at_now = np.concatenate([residuals, PULL * (now - origin)])
            found = least_squares(
                partial(_linear_residuals, rows=rows, at_now=at_now),
                np.zeros(len(now)),
                jac=partial(_linear_derivatives, rows=rows),
                bounds=_step_bounds(now, lowest, highest),
                loss="cauchy",
                f_scale=OUTLIER,
            )
            step = found.x
            after = self._residuals(names, now + step)
            while _loss(after, now + step - origin) > _loss(residuals, now - origin):
                step = step / 2
                after = self._residuals(names, now + step)
                if abs(step).max() < SETTLED:
                    break
            now = now + step
            residuals = after
            if abs(step).max() < SETTLED:
                break
        return _Solution(now.tolist(), replace(tangent, residuals=residuals))

    def _tangent(
        self,
        names: Sequence[str],
        logs: Sequence[float],
        residuals: Sequence[float],
        highest: Sequence[float],
    ) -> _Tangent:
        """At these logarithms, from the steps alone, without the pull."""

        def of_logs(logs: Sequence[float]) -> list[float]:
            return self._residuals(names, logs)

        families = [step.family or step.name for step in self.steps]
        jacobian = derivatives(of_logs, logs, before=residuals, highest=highest)
        return _Tangent(jacobian, residuals, families)

    def _log_bounds(self, names: Sequence[str]) -> tuple[list[float], list[float]]:
        bounds = [BOUNDS[name] for name in names]
        bounds += [SCALE_BOUNDS] * len(self.groups)
        lowest = []
        highest = []
        for low, high in bounds:
            lowest.append(math.log(low))
            highest.append(math.log(high))
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
