"""The watch of joined ranks: which rank is found hung, by whom, and when nothing is wrong. Threads over a store in memory."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

import pytest

from tests.comm.test_store_namespace import MemoryStore
from weft.comm.transport import Call
from weft.core.mesh import Mesh
from weft.run import peer_watch
from weft.run.peer_watch import PeerFailure, PeerWatch
from weft.run.rank_status import StatusBoard

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
    monkeypatch.setattr(peer_watch, "ANSWER_S", 0.3)
    monkeypatch.setattr(peer_watch, "POLL_S", 0.02)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    store = MemoryStore()
    made = []
    for rank in range(4):
        board = StatusBoard.create(tmp_path / f"board{rank}", 1)
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


def test_all_ranks_get_one_verdict_and_one_reports_it(ranks):
    ranks[0].enter(3, call(0, 1, 2))
    ranks[1].enter(3, call(0, 1, 2))
    watching = ranks[:2]
    verdict_of(ranks[0], *watching)
    deadline = time.monotonic() + WAIT_S
    while not ranks[1].verdicts and time.monotonic() < deadline:
        time.sleep(0.01)
    reporting = [rank.verdicts[0][1] for rank in watching]
    assert sorted(reporting) == [False, True]
    assert {verdict.rank for rank in watching for verdict, _ in rank.verdicts} == {2}


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


def test_a_call_that_all_have_joined_names_no_culprit(ranks):
    for rank in ranks[:2]:
        rank.enter(3, call(0, 1))
    with ranks[0].watch, ranks[1].watch:
        time.sleep(3 * TIMEOUT_S)
    assert ranks[0].verdicts == []
