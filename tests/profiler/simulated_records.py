"""Records of ranks as a simulated schedule would leave them: each waits for the message with its input, on one clock."""

from __future__ import annotations

from collections.abc import Mapping

from weft.core.mesh import Mesh
from weft.profiler.matched_calls import MatchedCalls
from weft.profiler.measured_steps import MeasuredSteps
from weft.profiler.rank_records import (
    STOP,
    ActionRecord,
    CallRecord,
    PhaseRecord,
    RankRecords,
    RecordHeader,
)
from weft.schedule.actions import Act, Table, needs
from weft.schedule.lower import Recv, Send, lower
from weft.schedule.simulate import action_times, unit_cost

UPDATE_S = 0.5
STEP = 7


def simulated_records(
    table: Table, *, hop: float = 0.0, slow: Mapping[int, float] | None = None
) -> tuple[RankRecords, ...]:
    """The records of one step of a pipeline; all ranks join an all-reduce before the update.

    Args:
        hop: seconds of a message.
        slow: factor of the actions of a rank.
    """
    factors = slow or {}
    times = action_times(
        table, lambda act: unit_cost(act) * factors.get(table.rank_of(act), 1.0), hop=hop
    )
    last_end = max(each.end for each in times.values())
    ranks = tuple(range(table.num_ranks))
    program = lower(table)
    found = []
    for rank in ranks:
        free_at = 0.0
        actions: list[ActionRecord] = []
        calls: list[CallRecord] = []
        for each in program.rows[rank]:
            if isinstance(each, Send):
                start = times[each.act].end
                calls.append(_message("send", (rank, each.peer), start, start, start))
            elif isinstance(each, Recv):
                arrival = times[each.act].end + hop
                user = _user(table, each.act, rank)
                begin = max(free_at, 0.0)
                before = table.rows[rank][: table.rows[rank].index(user)]
                began = times[before[-1]].end if before else 0.0
                wait = min(began, arrival)
                calls.append(_message("recv", (each.peer, rank), min(begin, wait), wait, arrival))
            else:
                interval = times[each]
                actions.append(ActionRecord(str(each), free_at, interval.end))
                free_at = interval.end
        norm = CallRecord(
            "all_reduce", "world", ranks, 8, "group", free_at, last_end, last_end, last_end
        )
        phases = (
            PhaseRecord(STEP, "data", 0.0),
            PhaseRecord(STEP, "forward", 0.0),
            PhaseRecord(STEP, "reduce", free_at),
            PhaseRecord(STEP, "update", last_end),
            PhaseRecord(STEP, "end", last_end + UPDATE_S),
            PhaseRecord(STEP, STOP, last_end + UPDATE_S),
        )
        calls.sort(key=lambda call: call.start)
        header = RecordHeader(
            profile=1,
            rank=rank,
            mesh=f"pp{table.num_ranks}",
            first=STEP,
            end=STEP + 1,
            host="one",
            clock="host",
        )
        found.append(RankRecords(header, phases, tuple(actions), (), (*calls, norm)))
    return tuple(found)


def _user(table: Table, producer: Act, rank: int) -> Act:
    """The action of a rank that uses the tensor of another one."""
    return next(
        act
        for act in table.rows[rank]
        if producer in needs(act, num_stages=table.num_stages, splits=table.splits)
        and act.stage != producer.stage
    )


def _message(op: str, ranks: tuple[int, int], start: float, wait: float, end: float) -> CallRecord:
    return CallRecord(op, "pp", ranks, 64, "group", start, start, wait, end)


def simulated_steps(
    table: Table, *, hop: float = 0.0, slow: Mapping[int, float] | None = None
) -> MeasuredSteps:
    """The steps of these records."""
    records = simulated_records(table, hop=hop, slow=slow)
    return MeasuredSteps(Mesh.parse(f"pp{table.num_ranks}"), records, MatchedCalls.of(records))
