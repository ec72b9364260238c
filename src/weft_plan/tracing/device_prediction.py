"""Prediction of the step of a run on a device, to compare a measured one with."""

from __future__ import annotations

from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import measure
from weft.planner.simulate.placed_steps import on_slowest_lane
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import step_time
from weft_plan.tracing.step_prediction import StepPrediction


def predict_on_device(run: MeasuredRun, speeds: Speeds) -> StepPrediction:
    """The prediction of `weft simulate` for a device.

    Raises:
        PlanError: the run is too large to be measured on the meta device.
    """
    roles = measure(run)
    step = step_time(roles, on_slowest_lane(roles, speeds))
    return StepPrediction(
        source=speeds.hardware.label,
        timeline=step.whole_timeline,
        step_s=step.total_s,
        bubble=step.bubble if run.plan.pipeline_size > 1 else None,
        exposed_s=dict(step.exposed_s),
    )
