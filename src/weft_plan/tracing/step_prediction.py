"""What a measured step is compared with: a prediction, here of its schedule alone. Imports no torch."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.core.dimension import pipeline_axis
from weft.layout.plan import Plan
from weft.profiler.measured_steps import MeasuredSteps
from weft.schedule.actions import Act
from weft.schedule.simulate import simulate
from weft.schedule.timeline import COMPUTE, KERNELS, Timeline, bubble, makespan


@dataclass(frozen=True)
class StepPrediction:
    """What a step was expected to do.

    Attributes:
        source: what the prediction is made of, for readers.
        timeline: of the pipeline coordinates.
        step_s: seconds of the step.
        bubble: idle share of the pipeline; None without a pipeline.
        exposed_s: by axis, waits of the busiest rank for collectives during its actions; None:
            communication is not predicted.
    """

    source: str
    timeline: Timeline
    step_s: float
    bubble: float | None
    exposed_s: Mapping[str, float] | None

    @cached_property
    def action_s(self) -> dict[Act, float]:
        """Seconds of each action."""
        return {
            Act.parse(span.name): float(span.duration)
            for span in self.timeline.spans
            if span.kind in COMPUTE
        }

    @cached_property
    def phase_s(self) -> dict[tuple[int, str], float]:
        """Seconds of the phases before and after the actions, by pipeline coordinate and name."""
        return {
            (span.rank, span.name): float(span.duration)
            for span in self.timeline.spans
            if span.lane == KERNELS and span.kind not in COMPUTE
        }


def predict_schedule(plan: Plan, steps: MeasuredSteps, numbers: Sequence[int]) -> StepPrediction:
    """The schedule of a plan with actions by the FLOPs of their stages, at the speed that the median
    rank reached between its calls; communication takes no time.
    """
    speed_s = statistics.median_low(_seconds_a_unit(plan, steps, numbers))
    timeline = simulate(plan.table, lambda act: speed_s * plan.action_units(act), unit="s")
    return StepPrediction(
        source="its schedule at the speed of the median rank, without communication",
        timeline=timeline,
        step_s=float(makespan(timeline)),
        bubble=float(bubble(timeline)) if plan.pipeline_size > 1 else None,
        exposed_s=None,
    )


def _seconds_a_unit(plan: Plan, steps: MeasuredSteps, numbers: Sequence[int]) -> list[float]:
    """Of each rank, what one unit of its actions took."""
    found = []
    for rank in range(len(steps.ranks)):
        by_step: defaultdict[int, float] = defaultdict(float)
        for action in steps.actions[rank]:
            by_step[action.step] += action.duration - action.blocked_s
        row = plan.table.rows[steps.mesh.index(rank, pipeline_axis())]
        units = sum(plan.action_units(act) for act in row)
        found.append(statistics.median(by_step[number] for number in numbers) / units)
    return found
