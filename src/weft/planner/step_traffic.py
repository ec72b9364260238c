"""Collectives and messages of a rank in a whole step, by mesh axis and operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from weft.comm.observe import Operation, Traffic
from weft.comm.transport import Op
from weft.core.dimension import pipeline_axis
from weft.planner.played_actions import action_keys
from weft.planner.rank_step import RankStep
from weft.planner.step_memory import boundary_bytes
from weft.schedule.actions import Act
from weft.schedule.lower import Send

TrafficByOperation = dict[tuple[str, Op], Traffic]
"""Totals by mesh axis (or several joined by "+") and operation."""


def step_traffic(step: RankStep, row: int) -> TrafficByOperation:
    """What the rank at pipeline coordinate `row` sends in a step; its stages are equal to those that
    were measured.
    """
    totals: TrafficByOperation = {}
    keys = action_keys(step.plan.table, row)
    for key, count in Counter(keys.values()).items():
        _add(totals, step.actions[key].operations, count)
    for region in step.phases.values():
        _add(totals, region.operations, 1)
    for instruction in step.plan.program.rows[row]:
        if not isinstance(instruction, Act):
            size = boundary_bytes(step.plan, instruction)
            is_send = isinstance(instruction, Send)
            op: Op = "send" if is_send else "recv"
            one = Traffic(1, size, size if is_send else 0)
            key_of_messages = (pipeline_axis(), op)
            totals[key_of_messages] = totals.get(key_of_messages, Traffic()) + one
    return totals


def _add(
    totals: TrafficByOperation,
    operations: Iterable[Operation],
    count: int,
) -> None:
    for op in operations:
        one = Traffic(count, count * op.payload_bytes, count * op.sent_bytes)
        key = (op.axis, op.op)
        totals[key] = totals.get(key, Traffic()) + one
