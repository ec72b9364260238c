"""The watch of joined ranks: which hung rank is found, by which rank, and no false alarms. Threads over a store in memory."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import asdict, dataclass, field

import pytest

from tests.comm.test_store_namespace import MemoryStore
from weft.comm.transport import Call
from weft.core.mesh import Mesh
from weft.run import peer_diagnosis, peer_watch
from weft.run.lock_holder import LockHolder
from weft.run.peer_watch import PeerFailure, PeerWatch
from weft.run.process_state import ProcessState
from weft.run.rank_status import NUM_GROUPS, StatusBoard

MESH = Mesh.parse("pp2 dp2")
TIMEOUT_S = 0.5
WAIT_S = 10.0


def call(*ranks: int) -> Call:
    return Call("all_reduce", "dp", ranks, 0, "all_reduce(sum) float32[4]")


@dataclass
class Rank:
    """One rank: its status and its watch."""

    watch: PeerWatch
    status: object
    verdicts: list[tuple[PeerFailure, bool]] = field(default_factory=list)

    def enter(self, step: int, *calls: Call) -> None:
        """Begin a backward, and wait for the last of these calls."""
        self.status.on_phase(step, "backward")
        for each in calls:
            position = self.status.started(each)
        if calls:
            self.status.waiting(calls[-1], position)


@pytest.fixture
def ranks(monkeypatch, tmp_path) -> list[Rank]:
    """Four ranks in step 3, of which rank 0 has a watch that is not started yet."""
    monkeypatch.setattr(peer_diagnosis, "ANSWER_S", 0.3)
    monkeypatch.setattr(peer_watch, "POLL_S", 0.02)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    store = MemoryStore()
    made = []
    for rank in range(4):
        path = tmp_path / f"board{rank}"
        board = StatusBoard.create(path, 1)
        verdicts: list[tuple[PeerFailure, bool]] = []
        watch = PeerWatch(
            store,
            rank,
            MESH,
            board,
            timeout_s=TIMEOUT_S,
            on_verdict=lambda verdict, is_own, verdicts=verdicts: verdicts.append(
                (verdict, is_own)
            ),
        )
        made.append(Rank(watch, board.rank(0), verdicts))
    return made


def verdict_of(rank: Rank, *watching: Rank) -> PeerFailure:
    """What `rank` finds while these ranks have a running watch."""
    for each in watching:
        each.watch.__enter__()
    try:
        deadline = time.monotonic() + WAIT_S
        while not rank.verdicts:
            assert time.monotonic() < deadline, "no verdict"
            time.sleep(0.01)
    finally:
        for each in watching:
            each.watch.__exit__()
    return rank.verdicts[0][0]


def test_a_rank_that_does_not_answer_is_stopped(ranks):
    ranks[0].enter(3, call(0, 1))
    verdict = verdict_of(ranks[0], ranks[0])
    assert verdict.rank == 1
    assert verdict.text.startswith("rank 1 (pp0 dp1): no answer for 0.3 s: stopped, or its machine")
    assert "missing in all_reduce(sum) float32[4] over dp, ranks 0 1; found by rank 0" in (
        verdict.text
    )


def test_a_stopped_process_is_found_in_a_phase_with_a_long_limit(ranks, monkeypatch):
    """While rank 0 saves, rank 1 of the same machine is stopped."""
    monkeypatch.setattr(peer_watch, "MIN_TIMEOUT_S", 0.2)
    states = {os.getpid(): ProcessState("T")}
    monkeypatch.setattr(peer_watch, "process_state", states.__getitem__)
    process = json.dumps(asdict(LockHolder.this_process()))
    ranks[0].status.on_phase(3, "save")
    position = ranks[0].status.started(call(0, 1))
    ranks[0].status.waiting(call(0, 1), position)
    ranks[0].watch._timeout_s = 0.0  # automatic limits: an hour in this phase
    ranks[0].watch._messages._store.set("process/1", process)
    verdict = verdict_of(ranks[0], ranks[0])
    assert verdict.rank == 1
    assert verdict.text.startswith("rank 1 (pp0 dp1): stopped for 0.2 s; missing in all_reduce")


def test_a_rank_that_computes_without_end_is_named_with_its_place(ranks):
    ranks[0].enter(3, call(0, 1))
    ranks[1].enter(3)
    ranks[1].status.on_block("layer5")
    verdict = verdict_of(ranks[0], ranks[0], ranks[1])
    assert verdict.text.startswith("rank 1 (pp0 dp1): step 3, backward of layer5: no progress for ")


def test_waiting_ranks_are_followed_to_the_culprit(ranks):
    ranks[0].enter(3, call(0, 1))
    ranks[1].enter(3, call(1, 3))
    ranks[3].enter(3, call(2, 3))
    verdict = verdict_of(ranks[0], ranks[0], ranks[1], ranks[3])
    assert verdict.rank == 2


def test_a_cycle_is_a_deadlock(ranks):
    ranks[0].enter(3, call(0, 1))
    ranks[1].enter(3, call(1, 3))
    ranks[3].enter(3, call(0, 3))
    verdict = verdict_of(ranks[0], ranks[0], ranks[1], ranks[3])
    cycle = "rank 0 -> rank 1 -> rank 3 -> rank 0 -> rank 1 -> rank 3"
    assert "deadlock, each waits for the next: " in verdict.text
    assert verdict.text.partition("the next: ")[2].partition(";")[0] in cycle


def test_a_call_of_a_group_that_is_not_counted_is_no_deadlock(ranks):
    many = [call(0, 1, other) for other in range(2, 2 + NUM_GROUPS)]
    for rank in ranks[:2]:
        rank.enter(3, *many, call(0, 1))
    with ranks[0].watch, ranks[1].watch:
        time.sleep(3 * TIMEOUT_S)
    assert not ranks[0].verdicts


def test_all_ranks_get_one_verdict_and_one_reports_it(ranks):
    ranks[0].enter(3, call(0, 1, 2))
    ranks[1].enter(3, call(0, 1, 2))
    watching = ranks[:2]
    with ranks[0].watch, ranks[1].watch:
        deadline = time.monotonic() + WAIT_S
        while not all(rank.verdicts for rank in watching) and time.monotonic() < deadline:
            time.sleep(0.01)
    reporting = [rank.verdicts[0][1] for rank in watching]
    assert sorted(reporting) == [False, True]
    actual = {verdict.rank for rank in watching for verdict, _ in rank.verdicts}
    assert actual == {2}


def test_slow_ranks_are_not_hung(ranks):
    ranks[0].enter(3, call(0, 1))
    ranks[1].enter(3)
    with ranks[0].watch, ranks[1].watch:
        end = time.monotonic() + 4 * TIMEOUT_S
        while time.monotonic() < end:
            ranks[1].status.on_block("layer5")
            time.sleep(0.05)
    assert ranks[0].verdicts == []


def test_the_timeout_is_not_that_of_the_start(ranks):
    """One rank builds its model for long, and the others wait for it."""
    position = ranks[0].status.started(call(0, 1))
    ranks[0].status.waiting(call(0, 1), position)
    ranks[1].status.on_phase(0, "start")
    with ranks[0].watch, ranks[1].watch:
        time.sleep(3 * TIMEOUT_S)
    assert ranks[0].verdicts == []


def test_a_call_without_data_that_all_have_joined_ends_after_the_limit(ranks):
    """A link is cut, and the store is reached another way."""
    for rank in ranks[:2]:
        rank.enter(3, call(0, 1))
    start_s = time.monotonic()
    verdict = verdict_of(ranks[0], *ranks[:2])
    assert time.monotonic() - start_s >= TIMEOUT_S
    host = os.uname().nodename
    place = f"rank {verdict.rank} ({MESH.coord_text(verdict.rank)})"
    assert verdict.rank in (0, 1)
    assert verdict.text.startswith(f"{place}: step 3, backward: all members have joined, ")
    assert "no data has arrived for" in verdict.text
    assert (
        f"the link between {host} and {host} is cut, or data is lost; stalled in " in verdict.text
    )
    assert "all_reduce(sum) float32[4] over dp, ranks 0 1; found by rank" in verdict.text


def test_a_member_that_joined_and_computes_without_end_is_named(ranks):
    """It has joined an asynchronous collective, and is stuck elsewhere."""
    ranks[0].enter(3, call(0, 1))
    ranks[1].status.on_phase(3, "backward")
    ranks[1].status.started(call(0, 1))
    ranks[1].status.on_block("layer2")
    verdict = verdict_of(ranks[0], *ranks[:2])
    assert verdict.text.startswith("rank 1 (pp0 dp1): step 3, backward of layer2: no progress for ")


def test_data_that_arrives_slowly_is_no_hang(ranks):
    """Members of a call wait for less than the limit, one call after the other."""
    with ranks[0].watch, ranks[1].watch:
        end = time.monotonic() + 4 * TIMEOUT_S
        step = 3
        while time.monotonic() < end:
            for rank in ranks[:2]:
                rank.enter(step, call(0, 1))
            step += 1
            time.sleep(0.6 * TIMEOUT_S)
    assert ranks[0].verdicts == ranks[1].verdicts == []


class SilentStore(MemoryStore):
    """A store whose machine becomes unreachable: requests are not answered, or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.is_cut = threading.Event()
        self.is_over = threading.Event()
        self.fails = False

    def check(self, keys: list[str]) -> bool:
        if self.is_cut.is_set():
            if self.fails:
                raise RuntimeError("Connection reset by peer")
            self.is_over.wait(WAIT_S)
        return super().check(keys)


@pytest.mark.parametrize("fails", [False, True])
def test_a_rank_that_cannot_reach_the_store_ends_after_the_limit(
    ranks, fails, monkeypatch, tmp_path
):
    store = SilentStore()
    store.fails = fails
    board = StatusBoard.create(tmp_path / "cut", 1)
    verdicts: list[PeerFailure] = []
    watch = PeerWatch(
        store,
        1,
        MESH,
        board,
        timeout_s=TIMEOUT_S,
        on_verdict=lambda verdict, is_own: verdicts.append(verdict),
    )
    cut = Rank(watch, board.rank(0))
    cut.enter(3, call(0, 1))
    store.set("process/0", json.dumps({**asdict(LockHolder.this_process()), "host": "node7"}))
    with watch:
        while not watch._store_host:
            time.sleep(0.01)
        start_s = time.monotonic()
        store.is_cut.set()
        while not verdicts and time.monotonic() < start_s + WAIT_S:
            time.sleep(0.01)
        store.is_over.set()
    (verdict,) = verdicts
    assert verdict.rank == 0
    assert verdict.text.startswith(
        "rank 0 (pp0 dp0) on node7: its machine has not answered rank 1 "
    )
    assert "the link is cut, or one of them is down; found by rank 1 at step 3" in verdict.text


def test_a_rank_that_makes_progress_without_the_store_goes_on(tmp_path):
    store = SilentStore()
    board = StatusBoard.create(tmp_path / "board", 1)
    verdicts: list[PeerFailure] = []
    watch = PeerWatch(
        store,
        1,
        MESH,
        board,
        timeout_s=TIMEOUT_S,
        on_verdict=lambda verdict, is_own: verdicts.append(verdict),
    )
    rank = Rank(watch, board.rank(0))
    with watch:
        store.is_cut.set()
        end = time.monotonic() + 3 * TIMEOUT_S
        while time.monotonic() < end:
            rank.enter(3, call(0, 1))
            time.sleep(0.05)
        store.is_over.set()
    assert verdicts == []
