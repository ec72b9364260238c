"""The check of a world finds planted faults (order, shape, missing calls, groups, deadlocks) and reports no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.planner.test_step_costs import run_of
from weft.cli import main
from weft.comm.observe import Operation
from weft.comm.signature import MemberCall, Signature, calls_agree
from weft.core.mesh import Mesh
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.recorder import CallRecorder, Ended, Event, Started
from weft.planner.measure.roles import measure
from weft.planner.world.call_mismatch import Mismatch
from weft.planner.world.rank_calls import CallEvent, RankCalls, group_of, recorded_coordinates
from weft.planner.world.rendezvous import find_deadlock
from weft.planner.world.world_check import Deadlock, RecordedWorld, check_recorded, record_world
from weft.schedule.lower import Program, Send
from weft.train.step import TrainStep

Events = tuple[CallEvent, ...]
Edit = Callable[[Events], Events]


@pytest.fixture(scope="module")
def world() -> RecordedWorld:
    """Eight ranks, each of which is played."""
    run = run_of("--mesh pp2,dp2,tp2 --batch.global_size 4 --model.layers 2")

    measured = MeasuredRun.of(run)

    def record_rank(rank: int) -> RankStep:
        return measure_rank(measured, rank, recorder_type=CallRecorder)

    return record_world(measure(measured), record_rank)


def edited(world: RecordedWorld, edits: dict[int, Edit]) -> RecordedWorld:
    """The world with edited calls in the action B1.1, by rank."""
    ranks: list[RankCalls] = []
    for calls in world.ranks:
        edit = edits.get(calls.rank)
        ranks.append(calls if edit is None else with_edited_backward(calls, edit))
    return replace(world, ranks=tuple(ranks))


def with_edited_backward(calls: RankCalls, edit: Edit) -> RankCalls:
    actions = dict(calls.actions)
    for key, events in calls.actions.items():
        if key.kind == "B" and key.place == "last":
            actions[key] = edit(events)
    return replace(calls, actions=actions)


def mismatch(world: RecordedWorld, rank: int, edit: Edit) -> Mismatch:
    problem = check_recorded(edited(world, {rank: edit})).problems[0]
    assert isinstance(problem, Mismatch)
    return problem


def replaced(events: Events, position: int, op: Operation) -> Events:
    """The events with another operation in place of the `position`-th one over tp."""
    old = tp_op(events, position)
    found: list[CallEvent] = []
    for event in events:
        kind = type(event)
        found.append(kind(op) if event.op is old else event)
    return tuple(found)


def tp_op(events: Events, position: int) -> Operation:
    started = [event.op for event in events if isinstance(event, Started)]
    return [op for op in started if op.axis == "tp"][position]


def test_a_world_without_faults_passes(world: RecordedWorld) -> None:
    check = check_recorded(world)
    assert check.problems == ()
    assert (check.num_ranks, check.num_recorded) == (8, 8)
    assert check.num_messages == 4  # two micro-batches: activations forth, gradients back
    assert check.num_calls > 100


def test_another_shape_is_named_with_both_ranks(world: RecordedWorld) -> None:
    def edit(events: Events) -> Events:
        op = tp_op(events, 1)
        text = op.signature.text.replace("32]", "31]")
        return replaced(events, 1, replace(op, signature=Signature(text)))

    found = mismatch(world, 5, edit)
    assert found.axis == "tp"
    assert found.region == "B1.1"
    assert found.position == 2
    assert found.ranks == (4, 5)
    assert found.coordinates == ("pp1 dp0 tp0", "pp1 dp0 tp1")
    assert "16, 32]" in found.calls[0]
    assert "16, 31]" in found.calls[1]


def test_swapped_calls_are_named_at_the_first_of_them(world: RecordedWorld) -> None:
    def edit(events: Events) -> Events:
        op = tp_op(events, 0)
        text = op.signature.text.replace("all_reduce(sum)", "all_reduce(max)")
        other = replace(op, op="reduce_scatter", signature=Signature(text))
        first = (Started(other), Ended(other))
        return (*first, *events)

    found = mismatch(world, 7, edit)
    assert found.ranks == (6, 7)
    assert found.position == 1
    assert "all_reduce(sum)" in found.calls[0]
    assert "all_reduce(max)" in found.calls[1]


def test_a_call_that_one_member_does_not_make(world: RecordedWorld) -> None:
    def edit(events: Events) -> Events:
        last = tp_op(events, -1)
        return tuple(event for event in events if event.op is not last)

    found = mismatch(world, 4, edit)
    assert found.ranks == (4, 5)
    assert found.calls[0].startswith("makes ")
    assert "all_reduce" in found.calls[1]


def test_a_call_over_another_group(world: RecordedWorld) -> None:
    def edit(events: Events) -> Events:
        return replaced(events, 0, replace(tp_op(events, 0), group=(4, 6)))

    found = mismatch(world, 4, edit)
    assert found.axis == "tp"
    assert found.position == 1
    assert found.ranks == (4, 5)
    assert "ranks 4 6" in found.calls[0]
    assert "group 4 5" in found.calls[1]


def test_orders_that_block_each_other_are_a_deadlock_with_its_cycle(world: RecordedWorld) -> None:
    """Ranks 4 and 7 call over dp before tp, their neighbours 5 and 6 over tp before dp."""
    dp = Operation("all_reduce", "dp", (4, 6), 4, 8, 8, Signature("all_reduce(sum) float32[2]"))

    def call_after(num_events: int, rank: int) -> Edit:
        """Insert a call over dp behind the first events of a rank."""
        first, second = dp.group
        column = (first + rank % 2, second + rank % 2)
        op = replace(dp, group=column, rank=rank)
        inserted = (Started(op), Ended(op))
        return lambda events: (*events[:num_events], *inserted, *events[num_events:])

    edits = {4: call_after(0, 4), 7: call_after(0, 7), 5: call_after(2, 5), 6: call_after(2, 6)}
    [problem] = check_recorded(edited(world, edits)).problems
    assert isinstance(problem, Deadlock)
    assert problem.region == "B1.1"
    waiting = [line.split(" is in ")[0] for line in problem.waits]
    assert sorted(waiting) == [
        "rank 4 (pp1 dp0 tp0)",
        "rank 5 (pp1 dp0 tp1)",
        "rank 6 (pp1 dp1 tp0)",
        "rank 7 (pp1 dp1 tp1)",
    ]
    assert "over dp, ranks 4 6 and waits for rank 6 (pp1 dp1 tp0)" in problem.waits[0]


def test_a_program_of_messages_that_stops_names_the_ranks_and_where_they_are(
    world: RecordedWorld,
) -> None:
    """Both pipeline ranks send before they receive."""
    rows = [list(row) for row in world.program.rows]
    gradient = next(each for each in rows[1] if isinstance(each, Send))
    rows[1].remove(gradient)
    rows[1].insert(0, gradient)
    program = Program(world.program.table, tuple(map(tuple, rows)))
    [problem] = check_recorded(replace(world, program=program)).problems
    assert isinstance(problem, Deadlock)
    assert problem.region == "the schedule"
    assert "rank 1 is at send(B1.0 to 0)" in problem.waits[0]


def in_bfloat16(op: Operation) -> Operation:
    text = op.signature.text.replace("float32", "bfloat16")
    return replace(op, signature=Signature(text))


def test_a_tensor_that_does_not_fit_the_buffer_of_its_receiver(world: RecordedWorld) -> None:
    ranks = []
    for calls in world.ranks:
        if calls.row == 0:
            sent = {key: in_bfloat16(op) for key, op in calls.sent.items()}
            calls = replace(calls, sent=sent)
        ranks.append(calls)
    [problem] = check_recorded(replace(world, ranks=tuple(ranks))).problems
    assert isinstance(problem, Mismatch)
    assert problem.axis == "pp"
    assert problem.ranks == (0, 4)
    assert problem.calls == ("send bfloat16[1, 16, 32]", "recv float32[1, 16, 32]")


def test_a_fault_in_a_phase_is_found_on_all_ranks(world: RecordedWorld) -> None:
    """Rank 6 lacks the last call behind the actions."""
    ranks = []
    for calls in world.ranks:
        if calls.rank == 6:
            reduce = calls.phases["reduce"][:-2]
            calls = replace(calls, phases={**calls.phases, "reduce": reduce})
        ranks.append(calls)
    [problem] = check_recorded(replace(world, ranks=tuple(ranks))).problems
    assert isinstance(problem, Mismatch)
    assert (problem.axis, problem.region) == ("world", "reduce")
    assert problem.ranks == (0, 6)


def test_explain_fails_for_code_that_depends_on_the_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A planted fault in the real code: one rank counts its targets in another dtype."""

    def counts(step: TrainStep, batches: object) -> torch.Tensor:
        comm = step.model.comm
        is_faulty = comm.index("dp") == 1
        count = torch.ones((), dtype=torch.float32 if is_faulty else torch.float64, device="meta")
        return comm.all_reduce(count, "dp")

    monkeypatch.setattr(TrainStep, "_count_targets", counts)
    assert main(["explain", "--mesh", "dp2", "--model.layers", "1", "--model.dim", "32"]) == 1
    text = capsys.readouterr().out
    assert "world check FAILED (2 ranks by 2 that were played):" in text
    assert "over dp, call 1 in targets differs:" in text
    assert "rank 0 (dp0): all_reduce(sum) float64[] over dp, ranks 0 1" in text
    assert "rank 1 (dp1): all_reduce(sum) float32[] over dp, ranks 0 1" in text


def test_ranks_at_the_ends_of_each_axis_stand_for_many() -> None:
    few = [*recorded_coordinates(Mesh.parse("pp4 dp2 tp2"))]
    assert len(few) == 4
    many = [*recorded_coordinates(Mesh.parse("pp16 dp128 tp8"))]
    assert many == [
        {"dp": 0, "tp": 0},
        {"dp": 0, "tp": 7},
        {"dp": 127, "tp": 0},
        {"dp": 127, "tp": 7},
    ]


def test_groups_of_an_axis_by_the_name_that_operations_give_it() -> None:
    mesh = Mesh.parse("pp2 dp16 tp2")
    assert group_of(mesh, 1, "tp") == (0, 1)
    assert group_of(mesh, 33, "pp") == (1, 33)
    assert group_of(mesh, 0, "world, stage 2 of 2") == (0, 16, 32, 48)
    assert group_of(mesh, 0, "other") is None


def test_split_sizes_of_two_members_must_match() -> None:
    def member(place: int, sent: tuple[int, ...], received: tuple[int, ...]) -> MemberCall:
        return MemberCall(place, Signature("all_to_all float32[4*]", sent, received))

    ours = member(0, (1, 3), (1, 2))
    assert calls_agree(ours, member(1, (2, 2), (3, 2)))
    assert not calls_agree(ours, member(1, (2, 2), (1, 2)))


def message(op: str, rank: int, pair: tuple[int, int]) -> Operation:
    return Operation(op, "cp", pair, rank, 8, 8)  # type: ignore[arg-type]


def one_after_another(*ops: Operation) -> tuple[Event, ...]:
    """Each is waited for before the next one starts."""
    events: list[Event] = []
    for op in ops:
        events += [Started(op), Ended(op)]
    return tuple(events)


def test_messages_wait_for_the_other_side() -> None:
    send = message("send", 0, (0, 1))
    recv = message("recv", 0, (1, 0))
    other_send = message("send", 1, (1, 0))
    other_recv = message("recv", 1, (0, 1))
    both_started = (Started(send), Started(recv), Ended(recv), Ended(send))
    second = one_after_another(other_recv, other_send)
    assert find_deadlock({0: both_started, 1: second}) == ()
    receives_first = one_after_another(recv, send)
    cycle = find_deadlock({0: receives_first, 1: second})
    first_blocked, second_blocked = cycle
    assert first_blocked.rank == 0
    assert first_blocked.waits_for == (1,)
    assert second_blocked.rank == 1
    assert second_blocked.waits_for == (0,)
