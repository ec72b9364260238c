"""The rule that detects hung ranks, on artificial boards and clocks: which rank is named, after how long, and no false alarms."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from weft.run.hang import BUSY_TIMEOUT_S, ENDED, MIN_STEPS, Hang, HangDetector, step_limit_s
from weft.run.process_state import ProcessState
from weft.run.rank_status import NO_GROUP, RankSnapshot, WaitingCall

DP, PP, SEND = 1, 2, 3
RUNS, SLEEPS, STOPPED, TRACED, DISK = (ProcessState(letter) for letter in "RSTtD")
QUICK = (0.05,) * 20


def snapshot(rank, *, waiting=None, started=None, phase="backward", times=QUICK, step=7):
    return RankSnapshot(
        rank=rank,
        pid=100 + rank,
        attempt=0,
        step=step,
        phase=phase,
        progress=1,
        changed_ns=0,
        block="layer1",
        waiting=waiting,
        num_started=started or {},
        step_times_s=times,
    )


def call(*members, group=DP, position=4, text="all_reduce(sum) float32[8] over dp"):
    return WaitingCall(text, members, group, position)


@dataclass
class Job:
    """Ranks that never make progress, and a clock of 0.1 s."""

    snapshots: list[RankSnapshot]
    states: dict[int, ProcessState] = field(default_factory=dict)
    ended: frozenset[int] = frozenset()
    timeout_s: float = 0.0
    patience: int = 1
    cpu_wait_share: float = 0.0
    now_s: float = 1000.0

    def __post_init__(self):
        self.detector = HangDetector(
            len(self.snapshots), timeout_s=self.timeout_s, patience=self.patience
        )
        ranks = range(len(self.snapshots))
        self.progress = [ENDED if rank in self.ended else 1 for rank in ranks]
        self.waited_ns = 0

    def tick(self, seconds=0.1):
        self.now_s += seconds
        self.waited_ns += round(1e9 * seconds * self.cpu_wait_share)
        suspicious = self.detector.suspicious(self.progress, now_s=self.now_s)
        states = {}
        for rank in suspicious:
            state = self.states.get(rank, SLEEPS)
            states[rank] = replace(state, cpu_wait_ns=((rank, self.waited_ns),))
        num_running = len(self.snapshots) - len(self.ended)
        self.detector.discount(states, num_running=num_running)
        return self.detector.find(self.snapshots, ended=self.ended)

    def hang_within(self, seconds) -> tuple[Hang | None, float]:
        """The hang and the time at which it is found."""
        start_s = self.now_s
        while self.now_s < start_s + seconds:
            hang = self.tick()
            if hang is not None:
                return hang, self.now_s - start_s
        return None, seconds


def three_ranks(culprit: RankSnapshot) -> list[RankSnapshot]:
    """Rank 1 is `culprit`; the others wait for it in their fifth call over dp."""
    waiting = call(0, 1, 2)
    return [
        snapshot(0, waiting=waiting, started={DP: 5}),
        culprit,
        snapshot(2, waiting=waiting, started={DP: 5}),
    ]


def test_a_stopped_rank_is_named_after_two_seconds():
    snapshots = three_ranks(snapshot(1, started={DP: 4}))
    job = Job(snapshots, {1: STOPPED})
    hang, after_s = job.hang_within(10)
    assert hang.kind == "stopped"
    assert hang.ranks == (1,)
    assert after_s == pytest.approx(2.1, abs=0.15)
    assert hang.text.startswith("step 7, backward of layer1: stopped (SIGSTOP) for 2.0 s")
    assert hang.text.endswith("missing in all_reduce(sum) float32[8] over dp, ranks 0 1 2")


def test_a_rank_stopped_inside_a_collective_that_all_have_joined_is_named():
    one_waits = snapshot(1, started={DP: 5}, waiting=call(0, 1, 2))
    job = Job(three_ranks(one_waits), {1: STOPPED})
    hang, after_s = job.hang_within(10)
    assert hang.kind == "stopped"
    assert hang.ranks == (1,)
    assert after_s < 2.5


@pytest.mark.parametrize("state", [RUNS, SLEEPS])
def test_a_pause_in_code_is_no_hang_for_a_minute_and_twice_that_after_a_restart_for_it(state):
    """A compilation, an allocation or a slow file system, where a step takes 50 ms."""
    snapshots = three_ranks(snapshot(1, started={DP: 4}, phase="forward"))
    for patience in (1, 2, 4):
        job = Job(snapshots, {1: state}, patience=patience)
        hang, after_s = job.hang_within(300)
        assert hang.kind == "stuck"
        assert hang.ranks == (1,)
        assert after_s == pytest.approx(60.1 * patience, abs=0.3)


def test_an_endless_loop_is_named_after_five_step_times():
    slow = (20.0,) * 20
    culprit = snapshot(1, started={DP: 4}, times=slow)
    ranks = [replace(rank, step_times_s=slow) for rank in three_ranks(culprit)]
    job = Job(ranks, {1: RUNS})
    hang, after_s = job.hang_within(200)
    assert hang.kind == "stuck"
    assert hang.ranks == (1,)
    assert after_s == pytest.approx(100.1, abs=0.2)


def test_two_groups_that_wait_for_each_other_are_a_deadlock_that_names_both():
    ranks = [
        snapshot(0, waiting=call(0, 1, group=DP, position=4), started={DP: 5, PP: 2}),
        snapshot(
            1,
            waiting=call(0, 1, group=PP, position=2, text="barrier over pp"),
            started={DP: 4, PP: 3},
        ),
    ]
    hang, after_s = Job(ranks).hang_within(10)
    assert hang.kind == "deadlock"
    assert set(hang.ranks) == {0, 1}
    assert after_s < 2.5
    assert "rank 0 waits in all_reduce(sum) float32[8] over dp, ranks 0 1 for rank 1" in hang.text
    assert "rank 1 waits in barrier over pp, ranks 0 1 for rank 0" in hang.text


def test_a_rank_that_waits_for_the_waiting_is_followed_to_the_culprit():
    """Rank 3 waits for a message of rank 2, which waits over dp for rank 1."""
    message = call(2, 3, group=SEND, position=0, text="recv float32[4] over pp")
    ranks = three_ranks(snapshot(1, started={DP: 4}))
    ranks.insert(0, snapshot(3, waiting=message, started={SEND: 1}))
    ranks = [*ranks[1:], ranks[0]]
    job = Job(ranks, {1: RUNS})
    hang, _ = job.hang_within(70)
    assert hang.kind == "stuck"
    assert hang.ranks == (1,)


def test_a_rank_whose_function_has_returned_is_named():
    snapshots = three_ranks(snapshot(1, started={DP: 4}, phase="end"))
    job = Job(snapshots, ended=frozenset({1}))
    hang, _ = job.hang_within(10)
    assert hang.kind == "ended"
    assert hang.ranks == (1,)
    assert hang.text.startswith("has ended; missing in all_reduce")


def test_a_call_that_all_have_joined_and_none_finishes_is_a_lost_connection():
    culprit = snapshot(1, waiting=call(0, 1, 2), started={DP: 5})
    job = Job(three_ranks(culprit))
    hang, after_s = job.hang_within(10)
    assert hang.kind == "stalled"
    assert set(hang.ranks) == {0, 1, 2}
    assert after_s < 2.5
    assert "all members have joined, but no data has arrived for 2.0 s" in hang.text


def test_progress_of_the_culprit_sets_its_clock_back():
    snapshots = three_ranks(snapshot(1, started={DP: 4}))
    job = Job(snapshots, {1: RUNS})
    for _ in range(200):
        job.progress[1] += 1
        for _ in range(15):
            assert job.tick() is None


@pytest.mark.parametrize("phase", ["start", "data", "evaluate", "save", "end"])
def test_phases_outside_of_a_step_have_generous_limits(phase):
    snapshots = three_ranks(snapshot(1, started={DP: 4}, phase=phase))
    job = Job(snapshots, {1: RUNS})
    assert job.hang_within(55)[0] is None
    kind = Job(job.snapshots, {1: STOPPED}).hang_within(5)[0].kind
    assert kind == "stopped"


def test_first_steps_have_a_generous_limit():
    times = QUICK[: MIN_STEPS - 1]
    ranks = [
        replace(rank, step_times_s=times) for rank in three_ranks(snapshot(1, started={DP: 4}))
    ]
    job = Job(ranks, {1: RUNS})
    hang, after_s = job.hang_within(400)
    assert after_s == pytest.approx(300, abs=1)
    assert hang.ranks == (1,)


def test_a_starved_rank_is_not_hung():
    """It is ready to run and gets a twentieth of a core."""
    ranks = three_ranks(snapshot(1, started={DP: 4}))
    job = Job(ranks, {1: RUNS}, cpu_wait_share=0.95)
    assert job.hang_within(20)[0] is None


@pytest.mark.parametrize(
    "state", [TRACED, DISK, replace(SLEEPS, is_held_by_terminal=True)], ids=str
)
def test_a_rank_that_a_debugger_a_disk_or_a_terminal_holds_up_is_not_hung(state):
    snapshots = three_ranks(snapshot(1, started={DP: 4}))
    job = Job(snapshots, {1: state})
    assert job.hang_within(20)[0] is None


def test_a_job_whose_ranks_are_all_stopped_is_suspended_and_not_hung():
    ranks = three_ranks(snapshot(1, started={DP: 4}))
    states = dict.fromkeys(range(3), STOPPED)
    job = Job(ranks, states)
    assert job.hang_within(20)[0] is None


def test_time_in_which_the_supervisor_did_not_run_does_not_count():
    snapshots = three_ranks(snapshot(1, started={DP: 4}))
    job = Job(snapshots, {1: RUNS})
    job.tick()
    assert job.tick(3600.0) is None
    assert job.hang_within(1.0)[0] is None


def test_a_given_timeout_replaces_the_automatic_limits_after_the_start():
    ranks = three_ranks(snapshot(1, started={DP: 4}, phase="evaluate"))
    job = Job(ranks, {1: RUNS}, timeout_s=7.0)
    hang, after_s = job.hang_within(20)
    assert hang.kind == "stuck"
    assert after_s == pytest.approx(7.1, abs=0.2)
    starting = three_ranks(snapshot(1, phase="start", step=0, times=()))
    assert Job(starting, {1: RUNS}, timeout_s=7.0).hang_within(60)[0] is None


def test_the_limit_follows_the_slowest_percent_of_steps():
    times = (9.0, 9.0, *(0.1,) * 100, 3.0)
    assert step_limit_s([snapshot(0, times=times)]) == 2.0, "one of 101 is beyond the percentile"
    actual = step_limit_s([snapshot(0, times=(9.0, 9.0, *(0.1,) * 50, 3.0))])
    assert actual == 15.0


@pytest.mark.parametrize("unknown", [call(0, 1, group=NO_GROUP), call()])
def test_calls_of_which_the_board_knows_no_members_are_no_deadlock(unknown):
    """Of groups beyond those that it counts, and of those whose members have no room: ranks in them
    have the limit of a pause.
    """
    job = Job([snapshot(rank, waiting=unknown) for rank in range(2)])
    assert job.hang_within(BUSY_TIMEOUT_S - 2)[0] is None
    hang, _ = job.hang_within(4)
    assert hang is not None
    assert (hang.kind, hang.call) == ("stuck", None)
