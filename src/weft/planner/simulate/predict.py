"""Prediction of a run on a device: does it fit, how long does a step take, how well are the devices used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.core.interval import Interval
from weft.layout.utilization import Utilization
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import RoleCosts, measure
from weft.planner.simulate.placed_steps import on_slowest_lane
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import StepTime, step_time


@dataclass(frozen=True)
class Prediction:
    """What a run is expected to do on a device.

    Attributes:
        roles: measured costs, one role a pipeline coordinate.
        speeds: of the device, fitted or assumed.
        step: parts of the predicted step, and its timeline.
        step_s: seconds of a step.
        peak_bytes: tensors of the fullest rank.
    """

    roles: tuple[RoleCosts, ...]
    speeds: Speeds
    step: StepTime
    step_s: Interval
    peak_bytes: int

    @property
    def fits(self) -> bool:
        """Whether the fullest rank's tensors fit the memory of the device."""
        return self.peak_bytes <= self.speeds.hardware.memory_bytes

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the whole run."""
        plan = self.roles[0].step.plan
        return plan.global_size * plan.seq_len / self.step.total_s

    @property
    def utilization(self) -> Utilization:
        """The model's FLOPs, and the devices' bf16 peak."""
        measured = self.roles[0].step
        peak = self.speeds.hardware.bf16_tflops
        return Utilization.of(measured.plan, peak_tflops=peak, adapted=measured.adapted)

    @property
    def mfu(self) -> float:
        """Model FLOPs (without recomputation) as a share of the devices' bf16 peak."""
        return self.utilization.mfu(self.step.total_s)


def predict(run: MeasuredRun, speeds: Speeds) -> Prediction:
    """Measure the run on meta tensors and predict its step.

    Raises:
        PlanError: the run is too large to be measured.
    """
    return predict_measured(measure(run), speeds)


def predict_measured(roles: Sequence[RoleCosts], speeds: Speeds) -> Prediction:
    """Predict the step of a run that has been measured."""
    step = step_time(roles, on_slowest_lane(roles, speeds))
    seconds = step.total_s
    return Prediction(
        roles=tuple(roles),
        speeds=speeds,
        step=step,
        step_s=speeds.efficiency.interval(seconds),
        peak_bytes=max(role.memory.peak for role in roles),
    )
