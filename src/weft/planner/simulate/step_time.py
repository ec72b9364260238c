"""Predicted time of a training step: regions of each rank in seconds, the lowered schedule, reduction and update.

Note [Parts of a step]
    Every rank counts its targets, plays its row of the lowered schedule (pipeline_time.py), and
    finishes its reductions. Then all ranks exchange a few numbers for the global norm, so the
    update of each begins when the last one has come to it. The step ends with the last update.
    Where z0 of KTO is estimated, forwards of all micro-batches are played before the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.core.dimension import pipeline_axis
from weft.layout.plan import Plan
from weft.planner.measure.roles import RoleCosts
from weft.planner.measure.step_memory import boundary_bytes
from weft.planner.simulate.pipeline_time import (
    ActionClass,
    ClassCosts,
    PipelineOrder,
    PlayedActions,
    StageMessage,
    pipeline_order,
    play,
)
from weft.planner.simulate.region_costs import CostTable, RegionCosts
from weft.planner.simulate.region_time import replay
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_timeline import PhaseSpan, step_timeline
from weft.schedule.actions import Act, Kind
from weft.schedule.lower import Transfer
from weft.schedule.timeline import Timeline

FORWARD_SHARE = 1 / 3
"""Of the time of a pipeline: a backward has twice the products of a forward."""


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one step.

    Attributes:
        total_s: of the slowest rank: the sum of the next four.
        targets_s: before the first action: the count of targets, and the forwards for z0 of KTO.
        pipeline_s: of the actions, from the first to the last one of any rank.
        reduce_s, update_s: after them: reductions that are still under way, the norm; the
            optimizer.
        exposed_s: waits of the busiest rank for collectives during its actions, by axis.
        bubble: idle share of the pipeline.
        flops: of all ranks.
        actions: when each action ran.
        phases: of each pipeline rank: what comes before and after its actions.
    """

    total_s: float
    targets_s: float
    pipeline_s: float
    reduce_s: float
    update_s: float
    exposed_s: Mapping[str, float]
    bubble: float
    flops: int
    actions: PlayedActions
    phases: tuple[PhaseSpan, ...]

    @property
    def forward_s(self) -> float:
        """Seconds of a rank's forwards, about: a third of its actions."""
        return FORWARD_SHARE * (1 - self.bubble) * self.pipeline_s

    @property
    def period_s(self) -> float:
        """Seconds from step to step where no rank waits for the global norm: what the busiest rank
        takes from its first action to the end of its update.
        """
        begins = self.actions.first_start
        busy = [phase.end - begins[phase.rank] for phase in self.phases if phase.name == "reduce"]
        return self.targets_s + max(busy) + self.update_s

    @cached_property
    def timeline(self) -> Timeline:
        """Of the actions, in seconds after the begin of the step."""
        return step_timeline(self.actions, ())

    @cached_property
    def whole_timeline(self) -> Timeline:
        """Of the actions, the phases before and after them, all collectives and all messages."""
        return step_timeline(self.actions, self.phases, with_operations=True)


def step_time(
    roles: Sequence[RoleCosts],
    speeds: Speeds,
    *,
    order: PipelineOrder | None = None,
    slow: Mapping[int, float] | None = None,
) -> StepTime:
    """The predicted time of a step of a measured run; see Note [Parts of a step].

    Args:
        roles: one a pipeline coordinate.
        order: `pipeline_order` of the run's table, where it is known already.
        slow: factor of the kernels of a pipeline coordinate.
    """
    plan = roles[0].step.plan
    if order is None:
        order = pipeline_order(plan.table)
    rows = range(len(roles))
    step = _StepCosts(roles, CostTable(speeds), slow or {})
    counts = [replay(step.phase(row, "targets")) for row in rows]
    begin = max(count.total for count in counts)
    costs = [step.action(plan, action_class) for action_class in order.classes]
    if roles[0].step.estimates_kl:
        forwards = pipeline_order(roles[0].step.programs[0].table, whole=plan.table)
        forward_costs = [step.action(plan, each) for each in forwards.classes]
        begin = max(play(forwards, forward_costs, begin=begin).last_end)
    played = play(order, costs, begin=begin)
    reductions = [step.reduction(row, played) for row in rows]
    synced_at = max(span.end for span in reductions)
    updates = [step.update(row, synced_at) for row in rows]
    ended_at = max(span.end for span in updates)
    pipeline_end = max(played.last_end)
    targets = [PhaseSpan(row, "targets", 0.0, begin, None) for row in rows]
    return StepTime(
        total_s=ended_at,
        targets_s=begin,
        pipeline_s=pipeline_end - begin,
        reduce_s=synced_at - pipeline_end,
        update_s=ended_at - synced_at,
        exposed_s=_most_exposed(played),
        bubble=_bubble(played, begin, pipeline_end),
        flops=sum(role.flops * role.num_ranks for role in roles),
        actions=played,
        phases=(*targets, *reductions, *updates),
    )


@dataclass(frozen=True)
class _StepCosts:
    """Costs of the regions of every pipeline coordinate."""

    roles: Sequence[RoleCosts]
    table: CostTable
    slow: Mapping[int, float]

    def action(self, plan: Plan, action_class: ActionClass) -> ClassCosts:
        row = action_class.rank
        recorded = self.roles[row].step.actions[action_class.key]
        region = self.table.region(recorded, slow=self.slow.get(row, 1.0))
        if action_class.peer is None:
            return ClassCosts(region)
        return ClassCosts(region, _message(plan, action_class, self.table.speeds))

    def phase(self, row: int, name: str) -> RegionCosts:
        recorded = self.roles[row].step.phases[name]
        return self.table.region(recorded, slow=self.slow.get(row, 1.0))

    def reduction(self, row: int, played: PlayedActions) -> PhaseSpan:
        """From the end of a rank's actions to the norm."""
        begin = played.ready_at[row]
        time = replay(
            self.phase(row, "reduce"), gap=begin - played.last_end[row], carried=played.carried[row]
        )
        return PhaseSpan(row, "reduce", begin, begin + time.total, time)

    def update(self, row: int, begin: float) -> PhaseSpan:
        """From the norm to the end of the step."""
        time = replay(self.phase(row, "update"))
        return PhaseSpan(row, "update", begin, begin + time.total, time)


def _message(plan: Plan, action_class: ActionClass, speeds: Speeds) -> StageMessage:
    """The message of an action's tensor to another pipeline coordinate."""
    peer = action_class.peer
    assert peer is not None
    sender = plan.mesh.rank(**{pipeline_axis(): action_class.rank})
    receiver = plan.mesh.rank(**{pipeline_axis(): peer})
    kind: Kind = "F" if action_class.key.kind == "F" else "B"
    act = Act(kind, action_class.stage, mb=0)
    size = boundary_bytes(plan, Transfer(act, peer))
    link = speeds.link_of((sender, receiver))
    return StageMessage.of(link, speeds.message_s(size, sender, receiver))


def _most_exposed(played: PlayedActions) -> dict[str, float]:
    """Waits of the rank that waits most for collectives, by axis."""
    order = played.order
    by_rank: list[dict[str, float]] = [{} for _ in played.last_end]
    for number, time in zip(order.class_of, played.times, strict=True):
        action_class = order.classes[number]
        exposed = by_rank[action_class.rank]
        for axis, seconds in time.exposed.items():
            before = exposed.get(axis, 0.0)
            exposed[axis] = before + seconds
    most = max(by_rank, key=_total)
    return {axis: seconds for axis, seconds in most.items() if seconds}


def _total(seconds: Mapping[str, float]) -> float:
    return sum(seconds.values())


def _bubble(played: PlayedActions, begin: float, end: float) -> float:
    """Idle share of all rank-time between the first begin and the last end of an action."""
    num_ranks = len(played.last_end)
    rank_time = (end - begin) * num_ranks
    if num_ranks == 1 or not rank_time:
        return 0.0
    busy = sum(time.total for time in played.times)
    return 1.0 - busy / rank_time
