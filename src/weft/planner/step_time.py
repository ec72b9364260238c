"""Predicted time of a training step: regions of a rank as seconds, and the whole pipeline as a timeline.

Note [Two lanes]
    A region is replayed in order on a lane for kernels and one lane a communicator. A collective
    begins when the rank starts it and its lane is free; where the real code waits for it, the lane
    of the kernels waits. So what overlaps is what the code overlaps; kernels beside a collective
    lose `Efficiency.overlap_slowdown` of its time. What is still under way at the end of the last
    backward is waited for in the phase "reduce".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weft.core.dimension import pipeline_axis
from weft.layout.plan import Plan
from weft.planner.kernels import KernelLaunch
from weft.planner.measure import RoleCosts
from weft.planner.rank_step import ActionKey, action_keys
from weft.planner.recorder import RecordedRegion, Started
from weft.planner.speeds import Speeds
from weft.planner.step_memory import boundary_bytes
from weft.schedule.actions import Act
from weft.schedule.lower import Transfer
from weft.schedule.simulate import simulate
from weft.schedule.timeline import Timeline, bubble, makespan


@dataclass(frozen=True)
class RegionTime:
    """Seconds of a region.

    Attributes:
        total: from its begin to its end.
        compute: of its kernels.
        exposed: waits for collectives, by axis.
        under_way: of collectives that have not ended at its end.
    """

    total: float
    compute: float
    exposed: Mapping[str, float]
    under_way: float


@dataclass
class _Lanes:
    """The lane of kernels, and when each communicator is free."""

    now: float = 0.0
    compute: float = 0.0
    communication: float = 0.0
    free_at: dict[tuple[str, bool], float] = field(default_factory=dict)
    ends: dict[int, float] = field(default_factory=dict)
    exposed: dict[str, float] = field(default_factory=dict)


def region_time(region: RecordedRegion, speeds: Speeds) -> RegionTime:
    """See Note [Two lanes]."""
    lanes = _Lanes()
    for event in region.events:
        if isinstance(event, KernelLaunch):
            seconds = speeds.kernel_s(event)
            lanes.now += seconds
            lanes.compute += seconds
        elif isinstance(event, Started):
            op = event.op
            lane = (op.axis, op.op == "recv")
            start = max(lanes.now, lanes.free_at.get(lane, 0.0))
            seconds = speeds.operation_s(op)
            lanes.communication += seconds
            lanes.free_at[lane] = start + seconds
            lanes.ends[id(op)] = lanes.free_at[lane]
        else:
            end = lanes.ends.pop(id(event.op), 0.0)  # of an earlier region: it has ended
            wait = max(0.0, end - lanes.now)
            lanes.now += wait
            axis = event.op.axis
            lanes.exposed[axis] = lanes.exposed.get(axis, 0.0) + wait
    latest = max(lanes.ends.values(), default=0.0)
    under_way = max(0.0, latest - lanes.now)
    seen = sum(lanes.exposed.values()) + under_way
    hidden = max(0.0, lanes.communication - seen)
    total = lanes.now + hidden * speeds.efficiency.overlap_slowdown
    return RegionTime(total, lanes.compute, lanes.exposed, under_way)


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one step.

    Attributes:
        total_s: of the slowest rank.
        pipeline_s: of the actions, from the first to the last one of any rank.
        reduce_s, update_s: after them: collectives that are still under way, the norm; the
            optimizer.
        exposed_s: waits of the busiest rank for collectives during its actions, by axis.
        bubble: idle share of the pipeline.
        timeline: of the actions, in seconds.
        flops: of all ranks.
    """

    total_s: float
    pipeline_s: float
    reduce_s: float
    update_s: float
    exposed_s: Mapping[str, float]
    bubble: float
    timeline: Timeline
    flops: int


def step_time(roles: Sequence[RoleCosts], speeds: Speeds) -> StepTime:
    """The predicted time of a step of a measured run."""
    plan = roles[0].step.plan
    rows = [_RowTimes.of(role, speeds) for role in roles]

    def cost(act: Act) -> float:
        return rows[plan.table.rank_of(act)].action_s(act)

    def hop(producer: Act, consumer: Act) -> float:
        return _transfer_s(plan, producer, consumer, speeds)

    timeline = simulate(plan.table, cost, hop=hop, unit="s")
    pipeline_s = float(makespan(timeline))
    reduce_s = max(row.reduce_s for row in rows)
    update_s = max(row.update_s for row in rows)
    busiest = max(rows, key=lambda row: sum(row.exposed.values()))
    return StepTime(
        total_s=pipeline_s + reduce_s + update_s,
        pipeline_s=pipeline_s,
        reduce_s=reduce_s,
        update_s=update_s,
        exposed_s=busiest.exposed,
        bubble=float(bubble(timeline)) if plan.pipeline_size > 1 else 0.0,
        timeline=timeline,
        flops=sum(role.flops * role.num_ranks for role in roles),
    )


@dataclass(frozen=True)
class _RowTimes:
    """Times of one pipeline coordinate."""

    keys: Mapping[Act, ActionKey]
    times: Mapping[ActionKey, RegionTime]
    reduce_s: float
    update_s: float
    exposed: Mapping[str, float]

    @staticmethod
    def of(role: RoleCosts, speeds: Speeds) -> _RowTimes:
        keys = action_keys(role.step.plan.table, role.row)
        used = set(keys.values())
        times = {key: region_time(role.step.actions[key], speeds) for key in used}
        phases = {name: region_time(region, speeds) for name, region in role.step.phases.items()}
        left = max(time.under_way for time in times.values())
        exposed: dict[str, float] = {}
        for key in keys.values():
            for axis, seconds in times[key].exposed.items():
                exposed[axis] = exposed.get(axis, 0.0) + seconds
        return _RowTimes(
            keys=keys,
            times=times,
            reduce_s=phases["targets"].total + max(left, 0.0) + phases["reduce"].total,
            update_s=phases["update"].total,
            exposed={axis: seconds for axis, seconds in exposed.items() if seconds},
        )

    def action_s(self, act: Act) -> float:
        return self.times[self.keys[act]].total


def _transfer_s(plan: Plan, producer: Act, consumer: Act, speeds: Speeds) -> float:
    """Seconds of the message between two pipeline coordinates."""
    sender = plan.mesh.rank(**{pipeline_axis(): plan.table.rank_of(producer)})
    receiver = plan.mesh.rank(**{pipeline_axis(): plan.table.rank_of(consumer)})
    size = boundary_bytes(plan, Transfer(producer, plan.table.rank_of(consumer)))
    return speeds.message_s(size, sender, receiver)
