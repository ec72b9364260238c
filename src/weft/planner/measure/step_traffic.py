"""Collectives and messages of a rank in a whole step, by mesh axis and operation."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from weft.comm.observe import Operation, Traffic
from weft.comm.transport import Op
from weft.core.dimension import pipeline_axis
from weft.planner.measure.rank_step import RankStep
from weft.planner.measure.step_memory import boundary_bytes
from weft.schedule.actions import Act
from weft.schedule.lower import Send

TrafficByOperation = dict[tuple[str, Op], Traffic]
"""Totals by mesh axis (or several joined by "+") and operation."""


def step_traffic(step: RankStep, row: int) -> TrafficByOperation:
    """What the rank at pipeline coordinate `row` sends in a step; its stages are equal to those that
    were measured.
    """
    totals: TrafficByOperation = {}
    plan = step.plan
    for key, times in step.times_of_key(row).items():
        _add_operations(totals, step.actions[key].operations, times)
    for region in step.phases.values():
        _add_operations(totals, region.operations, 1)
    for instruction in chain.from_iterable(program.rows[row] for program in step.programs):
        if isinstance(instruction, Act):
            continue
        size = boundary_bytes(plan, instruction)
        if isinstance(instruction, Send):
            _add(totals, (pipeline_axis(), "send"), Traffic(1, size, size))
        else:
            _add(totals, (pipeline_axis(), "recv"), Traffic(1, size, 0))
    return totals


def _add_operations(
    totals: TrafficByOperation, operations: Iterable[Operation], times: int
) -> None:
    for op in operations:
        traffic = Traffic(
            operations=times,
            payload_bytes=times * op.payload_bytes,
            sent_bytes=times * op.sent_bytes,
        )
        _add(totals, (op.axis, op.op), traffic)


def _add(totals: TrafficByOperation, key: tuple[str, Op], traffic: Traffic) -> None:
    before = totals.get(key, Traffic())
    totals[key] = before + traffic
