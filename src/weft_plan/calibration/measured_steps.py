"""Measured steps beside their predictions: counted work, measured seconds, residuals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.config.efficiency import Efficiency
from weft.config.hardware import Hardware
from weft.planner.measure.roles import RoleCosts
from weft.planner.simulate.pipeline_time import PipelineOrder, pipeline_order
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import step_time
from weft_plan.calibration.condensed import Condenser


@dataclass(frozen=True)
class MeasuredStep:
    """A run's step: its counted work and its measured time.

    Attributes:
        name: of the run, for the reader.
        roles: one a pipeline coordinate, from `measure`.
        seconds: of a step.
        group: steps of one group have a free scale in common; "": none.
        family: steps alike, which are left out together where the range is made; "": its name.
        hardware: of this run, where it differs from that of the fit in its figures.
        waits_for_norm: whether every rank waits for the global norm, as in weft. If not, each goes on
            with the next step (post-validation: Qi et al. 2023, section 4).
    """

    name: str
    roles: tuple[RoleCosts, ...]
    seconds: float
    group: str = ""
    family: str = ""
    hardware: Hardware | None = None
    waits_for_norm: bool = True

    @cached_property
    def order(self) -> PipelineOrder:
        """The order of actions of its schedule."""
        return pipeline_order(self.roles[0].step.plan.table)

    def predicted_s(self, speeds: Speeds) -> float:
        """Seconds of a step by the prediction."""
        time = step_time(self.roles, speeds, order=self.order)
        return time.total_s if self.waits_for_norm else time.period_s


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
    predicted = []
    for step in steps:
        own = step.hardware or hardware
        speeds = Speeds(own.with_efficiency(constants))
        scale = scales.get(step.group, 1.0)
        predicted.append(scale * step.predicted_s(speeds))
    return predicted
