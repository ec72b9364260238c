"""The hang rule: which rank is stuck, from what the ranks report and what their processes do. Pure: no clock, no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.run.process_state import STOPPED, TRACED, WAITS_FOR_DEVICE, ProcessState
from weft.run.rank_status import Phase, RankSnapshot, WaitingCall

# Note [What counts as a hang]
# A rank is stuck if it has reported nothing new for longer than its limit and waits for no other rank. Ranks that wait in a
# collective are followed to the members that have not joined it. What is found at the end of the path:
#
#     a rank that is stopped
#     a rank that does not wait      it computes or sleeps: a pause, until its limit says that it is without end
#     a rank on the path again       a deadlock: each waits for a call that the other reaches only later
#     a rank that has ended          its function returned before the others did
#     all members have joined        the data does not arrive
#
# The host of a rank on GPUs does not wait in a collective, but somewhere behind it for its device. Such a rank waits in the
# oldest call that its device has not completed, unless it makes progress. What looks like a deadlock may be a kernel there
# that computes for long: it has the limit of data that does not arrive.
#
# A stopped process, a deadlock and a rank that has ended cannot resolve themselves: 2 s. Data that does not arrive has 5
# times the 99th percentile of the step times, at least 2 s. A rank in code may pause (a compilation, an allocation, a slow
# file system): 60 s at least, and twice as long after each restart at the same place, so that a pause of any length passes.
# The limits are generous where a step time says nothing: start, first steps, data, evaluation, saving, an exchange between sites.
# Time does not count while a thread of the rank waits for a core
# (an overloaded machine), while the supervisor itself does not run (Ctrl-Z, a suspended machine), while all ranks are
# stopped, and while a rank waits for a disk, a debugger, or the reader of its output (Ctrl-S).

MIN_TIMEOUT_S = 2.0
BUSY_TIMEOUT_S = 60.0
"""Of a rank that computes or sleeps within a step."""
STEP_FACTOR = 5.0
PERCENTILE = 0.99
MIN_STEPS = 5
"""Steps of a rank after which step times are known; the first ones warm up."""
WARM_UP_STEPS = 2
SUSPICIOUS_S = 0.5
"""Without progress for this long, the process of a rank is looked at."""
MAX_INTERVAL_S = 0.5
"""Longer intervals between two checks count as this: the supervisor did not run."""
PHASE_LIMITS_S: dict[Phase, float] = {
    "start": 3600.0,
    "data": 300.0,
    "forward": 300.0,
    "backward": 300.0,
    "reduce": 300.0,
    "update": 300.0,
    "exchange": 3600.0,
    "evaluate": 120.0,
    "save": 3600.0,
    "end": 120.0,
}
"""Limits while step times are unknown, and in phases that are not part of a step."""
STEP_PHASES: tuple[Phase, ...] = ("forward", "backward", "reduce", "update")

ENDED = -1

HangKind = Literal["stopped", "stuck", "deadlock", "ended", "stalled"]


@dataclass(frozen=True)
class Hang:
    """A hang, its ranks and what they wait for.

    Attributes:
        ranks: the culprit; of a deadlock all ranks of the cycle; of a stalled call its members.
        seconds: how long the first of them has made no progress.
        call: a call that waits for the culprit, or the stalled one.
        text: what the culprit does, without its rank and coordinates.
    """

    kind: HangKind
    ranks: tuple[int, ...]
    seconds: float
    call: WaitingCall | None
    text: str


def step_limit_s(snapshots: Sequence[RankSnapshot]) -> float:
    """The limit within a step; infinite while step times are unknown."""
    times: list[float] = []
    for snapshot in snapshots:
        if len(snapshot.step_times_s) < MIN_STEPS:
            return math.inf
        times += snapshot.step_times_s[WARM_UP_STEPS:]
    if not times:
        return math.inf
    times.sort()
    index = math.ceil(PERCENTILE * len(times)) - 1
    return max(MIN_TIMEOUT_S, STEP_FACTOR * times[index])


def phase_limit_s(phase: Phase, *, step_s: float, timeout_s: float) -> float:
    """How long a rank that waits for no other may make no progress in a phase.

    Args:
        step_s: see `step_limit_s`.
        timeout_s: limit of everything after the start; 0: automatic.
    """
    if timeout_s and phase != "start":
        return timeout_s
    if phase in STEP_PHASES and math.isfinite(step_s):
        return step_s
    known_s = step_s if math.isfinite(step_s) else 0.0
    return max(PHASE_LIMITS_S[phase], known_s, timeout_s)


def busy_limit_s(phase: Phase, *, step_s: float, timeout_s: float, patience: int) -> float:
    """How long a rank may compute or sleep in a phase without progress, as `phase_limit_s`.

    Args:
        patience: factor; 2 after a restart for a pause, 4 after the second one at the same place.
    """
    limit_s = phase_limit_s(phase, step_s=step_s, timeout_s=timeout_s)
    if phase in STEP_PHASES and not timeout_s:
        limit_s = max(BUSY_TIMEOUT_S, limit_s)
    return patience * limit_s


class HangDetector:
    """Applies the rule to successive looks at the ranks.

    Args:
        timeout_s: limit of everything after the start; 0: automatic, see Note [What counts as a
            hang].
        patience: see `busy_limit_s`.
    """

    def __init__(self, num_ranks: int, *, timeout_s: float = 0.0, patience: int = 1) -> None:
        self.timeout_s = timeout_s
        self.patience = patience
        self.stalled_s = [0.0] * num_ranks
        self._progress = [ENDED] * num_ranks
        self._states: list[ProcessState | None] = [None] * num_ranks
        self._checked_at_s = math.nan
        self._interval_s = 0.0

    @property
    def shortest_limit_s(self) -> float:
        """No hang is found before."""
        return self.timeout_s or MIN_TIMEOUT_S

    def suspicious(self, progress: Sequence[int], *, now_s: float) -> tuple[int, ...]:
        """Advance the clocks of all ranks; those without progress for SUSPICIOUS_S, whose processes
        `find` wants to see.

        Args:
            progress: progress counter of every rank; ENDED for one that has ended.
        """
        interval_s = 0.0
        if not math.isnan(self._checked_at_s):
            # a supervisor that was stopped or starved knows nothing of what its ranks did meanwhile
            interval_s = min(now_s - self._checked_at_s, MAX_INTERVAL_S)
        self._checked_at_s = now_s
        found: list[int] = []
        for rank, value in enumerate(progress):
            if value != self._progress[rank]:
                self._progress[rank] = value
                self.stalled_s[rank] = 0.0
                # a rank that has moved is compared with its next state, not with one from before
                self._states[rank] = None
            else:
                self.stalled_s[rank] += interval_s
            # /proc is read for the few that stand still
            if value != ENDED and self.stalled_s[rank] >= SUSPICIOUS_S:
                found.append(rank)
        self._interval_s = interval_s
        return tuple(found)

    def discount(self, states: dict[int, ProcessState], *, num_running: int) -> None:
        """Take back the last interval for ranks that could not run in it.

        Args:
            states: the processes of the suspicious ranks.
        """
        num_stopped = sum(state.state == STOPPED for state in states.values())
        are_all_stopped = num_stopped == num_running and num_running > 1
        for rank, state in states.items():
            if are_all_stopped:
                lost_s = self._interval_s
            else:
                lost_s = self._lost_s(state, self._states[rank])
            self._states[rank] = state
            self.stalled_s[rank] = max(0.0, self.stalled_s[rank] - lost_s)

    def _lost_s(self, state: ProcessState, before: ProcessState | None) -> float:
        """Seconds of the last interval in which a process could not run.

        Args:
            before: its state at the beginning of the interval, if that is known.
        """
        if state.state in (TRACED, WAITS_FOR_DEVICE) or state.is_held_by_terminal:
            return self._interval_s
        if before is None:
            return 0.0
        starved_s = 1e-9 * state.starved_ns(before)
        return min(self._interval_s, starved_s)

    def find(
        self, snapshots: Sequence[RankSnapshot], *, ended: frozenset[int] = frozenset()
    ) -> Hang | None:
        """The hang, if there is one.

        Args:
            snapshots: of all ranks, in rank order; the last one of a rank that has ended.
        """
        return diagnose(
            snapshots,
            ended=ended,
            states=self._states,
            stalled_s=self.stalled_s,
            timeout_s=self.timeout_s,
            patience=self.patience,
        )


def diagnose(
    snapshots: Sequence[RankSnapshot],
    *,
    ended: frozenset[int],
    states: Sequence[ProcessState | None],
    stalled_s: Sequence[float],
    timeout_s: float = 0.0,
    patience: int = 1,
) -> Hang | None:
    """The hang in one look at all ranks, if there is one; see Note [What counts as a hang].

    Args:
        snapshots, states, stalled_s: of all ranks, in rank order.
    """
    running = [snapshot for snapshot in snapshots if snapshot.rank not in ended]
    diagnosis = _Diagnosis(
        snapshots,
        ended,
        states,
        stalled_s,
        timeout_s=timeout_s,
        patience=patience,
        step_s=step_limit_s(running),
    )
    for snapshot in running:
        if stalled_s[snapshot.rank] >= diagnosis.certain_limit_s:
            hang = diagnosis.follow(snapshot, path=())
            if hang is not None:
                return hang
    return None


@dataclass(frozen=True)
class _Diagnosis:
    """One look at all ranks; see Note [What counts as a hang]."""

    snapshots: Sequence[RankSnapshot]
    ended: frozenset[int]
    states: Sequence[ProcessState | None]
    stalled_s: Sequence[float]
    timeout_s: float
    patience: int
    step_s: float

    @property
    def certain_limit_s(self) -> float:
        """The limit of what cannot resolve itself: a stopped process, a deadlock, an ended rank."""
        return self.timeout_s or MIN_TIMEOUT_S

    def follow(self, snapshot: RankSnapshot, *, path: tuple[RankSnapshot, ...]) -> Hang | None:
        """The hang of `snapshot`, or of a rank that it waits for.

        Args:
            path: ranks that wait for it, the first is where the search began.
        """
        rank = snapshot.rank
        stalled_s = self.stalled_s[rank]
        if self._is_stopped(rank):
            if stalled_s < self.certain_limit_s:
                return None
            text = f"{snapshot.place}: stopped (SIGSTOP) for {stalled_s:.1f} s"
            return self._hang("stopped", rank, text)
        if snapshot in path:
            return self._deadlock(path[path.index(snapshot) :])
        if snapshot.waiting is None or not snapshot.waiting.has_known_members:
            limit_s = busy_limit_s(
                snapshot.phase, step_s=self.step_s, timeout_s=self.timeout_s, patience=self.patience
            )
            if stalled_s < limit_s:
                return None
            text = f"{snapshot.place}: no progress for {stalled_s:.1f} s"
            return self._hang("stuck", rank, text)
        if stalled_s < self.certain_limit_s:
            return None
        missing = missing_members(snapshot.waiting, self.snapshots)
        for member in missing:
            if member in self.ended:
                return self._hang("ended", member, "has ended")
            # all members that are missing are followed: the first may wait for a third that
            # computes, and another be stopped
            hang = self.follow(self.snapshots[member], path=(*path, snapshot))
            if hang is not None:
                return hang
        return None if missing else self._stalled(snapshot, snapshot.waiting)

    def _stalled(self, snapshot: RankSnapshot, call: WaitingCall) -> Hang | None:
        """A call that all members have joined: one of them is stuck elsewhere, no data arrives, or a
        device does not get to it.
        """
        seconds = min(self.stalled_s[member] for member in call.members)
        for member in call.members:
            other = self.snapshots[member]
            is_in_the_call = other.waiting is not None and not self._is_stopped(member)
            # it has joined the call and left it, or not begun to wait: what it does elsewhere holds up the others
            if member not in self.ended and not is_in_the_call:
                hang = self.follow(other, path=())
                if hang is not None:
                    return hang
        if seconds < self._limit_s(snapshot):
            return None
        what = "its device has not completed it" if call.is_on_device else "no data has arrived"
        text = (
            f"{snapshot.place}: {_call_text(call)}: all members have joined, "
            f"but {what} for {seconds:.1f} s"
        )
        others = tuple(member for member in call.members if member != snapshot.rank)
        return Hang("stalled", (snapshot.rank, *others), seconds, call, text)

    def _deadlock(self, cycle: Sequence[RankSnapshot]) -> Hang | None:
        first, *others = cycle
        waits: list[str] = []
        seconds = self.stalled_s[first.rank]
        for snapshot, awaited in zip(cycle, (*others, first), strict=True):
            assert snapshot.waiting is not None, "ranks of a cycle wait"
            # the device may be in a kernel before the call, which no board shows
            if snapshot.waiting.is_on_device and seconds < self._limit_s(snapshot):
                return None
            call = _call_text(snapshot.waiting)
            waits.append(f"rank {snapshot.rank} waits in {call} for rank {awaited.rank}")
        text = f"{first.place}: deadlock for {seconds:.1f} s: {'; '.join(waits)}"
        ranks = tuple(snapshot.rank for snapshot in cycle)
        return Hang("deadlock", ranks, seconds, first.waiting, text)

    def _hang(self, kind: HangKind, rank: int, text: str) -> Hang:
        call = self._call_that_waits_for(rank)
        if call is not None:
            text += f"; missing in {_call_text(call)}"
        return Hang(kind, (rank,), self.stalled_s[rank], call, text)

    def _call_that_waits_for(self, rank: int) -> WaitingCall | None:
        for snapshot in self.snapshots:
            call = snapshot.waiting
            if call is None or snapshot.rank in (rank, *self.ended):
                continue
            if rank in missing_members(call, self.snapshots):
                return call
        return None

    def _is_stopped(self, rank: int) -> bool:
        state = self.states[rank]
        return state is not None and state.state == STOPPED

    def _limit_s(self, snapshot: RankSnapshot) -> float:
        return phase_limit_s(snapshot.phase, step_s=self.step_s, timeout_s=self.timeout_s)


def missing_members(call: WaitingCall, snapshots: Sequence[RankSnapshot]) -> tuple[int, ...]:
    """Members of a call that have not started it; none where that is not known."""
    if not call.has_known_members:
        return ()
    return tuple(
        member
        for member in call.members
        if snapshots[member].num_started.get(call.group, 0) <= call.position
    )


def _call_text(call: WaitingCall) -> str:
    members = " ".join(str(member) for member in call.members)
    return f"{call.text}, ranks {members}"
