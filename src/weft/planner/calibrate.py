"""Fit of a device's constants (`Efficiency`) to measured steps, with their uncertainty and the range of predictions.

Note [Fit]
    The fit minimizes the logarithms of predicted over measured seconds, so that a run of
    milliseconds counts as much as one of minutes, and an outlier little (soft L1, Huber-like).
    Predictions are those of `step_time`: there is no second model. Constants are fitted as
    logarithms within physical bounds and drawn weakly to where they start, so that what the runs
    do not determine stays there; its uncertainty then says so. Uncertainties are standard errors
    from the Gauss-Newton covariance. The range `low` to `high` holds 80% of measured over
    predicted times, from runs that the fit has not seen where there are such.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.config.efficiency import Efficiency
from weft.config.hardware import Hardware
from weft.errors import Fault, PlanError, WeftError
from weft.planner.measure import RoleCosts
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
OUTLIER = 0.05
"""Residual (logarithm of a ratio) above which a step counts less."""
PULL = 0.01
"""Residual of a constant that is e times its start: what runs say must be stronger."""
SETTLED = 1e-3
"""Relative change of the constants at which the fit ends."""
MOST_EVALUATIONS = 15
COVERED = 0.8
"""Share of measured times in the range of a prediction."""
UNDETERMINED = 1.0
"""Standard error of the logarithm of a constant above which the runs do not determine it."""


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
        uncertainty: standard error of each fitted constant as a share of it; infinite where the
            runs do not determine it.
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
    """Fit the constants of a device to measured steps.

    Args:
        source: what they are fitted to.
        start: constants to start from; those that are 0 are not fitted.

    Raises:
        PlanError: fewer steps than constants that matter, or a time that is not positive.
        WeftError: scipy is not installed.
    """
    start = start or Efficiency()
    _check_steps(steps)
    least_squares = _least_squares()
    names = _constants_that_matter(steps, hardware, start)
    groups = sorted({step.group for step in steps if step.group})
    if len(steps) <= len(names) + len(groups):
        need = f"more than the {len(names) + len(groups)} constants that are fitted"
        raise PlanError(Fault("calibrate", "too few runs", f"{len(steps)}", need))
    bounds = [BOUNDS[name] for name in names] + [SCALE_BOUNDS] * len(groups)
    low = [math.log(lowest) for lowest, _ in bounds]
    high = [math.log(highest) for _, highest in bounds]
    origin = [math.log(getattr(start, name)) for name in names] + [0.0] * len(groups)
    inside = [min(max(at, a), b) for at, a, b in zip(origin, low, high, strict=True)]

    def residuals(logs: Sequence[float]) -> list[float]:
        constants = _with_logs(start, names, logs[: len(names)])
        scales = dict(zip(groups, map(math.exp, logs[len(names) :]), strict=True))
        predicted = predict_all(steps, hardware, constants, scales)
        pulls = [PULL * (log - at) for log, at in zip(logs, origin, strict=True)]
        return [*_log_ratios(steps, predicted), *pulls]

    found = least_squares(
        residuals,
        inside,
        bounds=(low, high),
        loss="soft_l1",
        f_scale=OUTLIER,
        diff_step=1e-3,
        xtol=SETTLED,
        max_nfev=MOST_EVALUATIONS,
    )
    constants = _with_logs(start, names, found.x[: len(names)])
    scales = dict(zip(groups, map(math.exp, found.x[len(names) :]), strict=True))
    compared = compare(steps, hardware, constants, scales=scales)
    lowest, highest = ratio_range(compared, num_constants=len(bounds))
    return Calibration(
        efficiency=replace(constants, source=source, low=lowest, high=highest),
        uncertainty=_uncertainty(names, found, len(steps)),
        residuals=compared,
        scales=scales,
    )


def compare(
    steps: Sequence[MeasuredStep],
    hardware: Hardware,
    constants: Efficiency,
    *,
    scales: Mapping[str, float] | None = None,
) -> tuple[Residual, ...]:
    """Measured steps beside their predictions."""
    predicted = predict_all(steps, hardware, constants, scales or {})
    return tuple(
        Residual(step.name, step.seconds, seconds)
        for step, seconds in zip(steps, predicted, strict=True)
    )


def predict_all(
    steps: Sequence[MeasuredStep],
    hardware: Hardware,
    constants: Efficiency,
    scales: Mapping[str, float],
) -> list[float]:
    """The predicted seconds of each step."""
    speeds = Speeds(hardware.with_efficiency(constants))
    return [step_seconds(step.roles, speeds) * scales.get(step.group, 1.0) for step in steps]


def ratio_range(residuals: Sequence[Residual], *, num_constants: int = 0) -> tuple[float, float]:
    """The range of measured over predicted times that holds 80% of them.

    Args:
        num_constants: fitted to these very steps, whose spread is too small for that.
    """
    ratios = sorted(residual.ratio for residual in residuals)
    free = max(1, len(ratios) - num_constants)
    widening = math.sqrt(len(ratios) / free)
    tail = (1 - COVERED) / 2
    low = quantile(ratios, tail) ** widening
    high = quantile(ratios, 1 - tail) ** widening
    return min(low, 1.0), max(high, 1.0)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share of the values lies, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def _check_steps(steps: Sequence[MeasuredStep]) -> None:
    for step in steps:
        if not (math.isfinite(step.seconds) and step.seconds > 0):
            raise PlanError(Fault("calibrate", f"{step.name} has no time", f"{step.seconds} s"))


def _least_squares() -> Callable[..., Any]:
    try:
        from scipy.optimize import least_squares
    except ImportError:
        fix = 'pip install "weft-train[plan]"'
        raise WeftError(str(Fault("calibrate", "scipy is not installed", fix=fix))) from None
    return least_squares  # type: ignore[no-any-return]


def _constants_that_matter(
    steps: Sequence[MeasuredStep], hardware: Hardware, start: Efficiency
) -> list[str]:
    """Constants on which the time of a step depends."""
    before = predict_all(steps, hardware, start, {})
    names = []
    for name in BOUNDS:
        value = getattr(start, name)
        if not value:
            continue
        changed = replace(start, **{name: 0.8 * value})
        if predict_all(steps, hardware, changed, {}) != before:
            names.append(name)
    return names


def _with_logs(start: Efficiency, names: Sequence[str], logs: Sequence[float]) -> Efficiency:
    values: dict[str, Any] = {name: math.exp(log) for name, log in zip(names, logs, strict=True)}
    return replace(start, **values)


def _log_ratios(steps: Sequence[MeasuredStep], predicted: Sequence[float]) -> list[float]:
    return [
        math.log(seconds / step.seconds) for step, seconds in zip(steps, predicted, strict=True)
    ]


def _uncertainty(names: Sequence[str], found: Any, num_steps: int) -> dict[str, float]:
    """Standard errors of the logarithms: s^2 (J'J)^-1 of the steps alone, without the pull."""
    import numpy as np  # scipy's, which is an extra

    jacobian = np.asarray(found.jac)[:num_steps]
    errors = np.asarray(found.fun)[:num_steps]
    free = max(1, num_steps - len(names))
    variance = float(np.square(errors).sum()) / free
    covariance = variance * np.linalg.pinv(jacobian.T @ jacobian, rcond=1e-12)
    uncertainty = {}
    for index, name in enumerate(names):
        is_used = bool(np.any(jacobian[:, index]))
        error = math.sqrt(max(0.0, float(covariance[index, index])))
        is_determined = is_used and error < UNDETERMINED
        uncertainty[name] = error if is_determined else math.inf
    return uncertainty
