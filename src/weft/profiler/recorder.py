"""Recorder of one rank: keeps when phases, actions, blocks and calls begin and end, and reads the clock's marks at the end.

A record is a list append and two or three marks of the clock; nothing is formatted, written or waited for before
`records`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.comm.observe import payload_bytes
from weft.comm.transport import Call
from weft.profiler.clocks import Clock, Mark
from weft.profiler.ranges import NamedRanges
from weft.profiler.rank_records import (
    MOST_RECORDS,
    STOP,
    ActionRecord,
    BlockRecord,
    CallRecord,
    PhaseRecord,
    RankRecords,
    RecordHeader,
)
from weft.schedule.actions import KIND_MEANING, Act

ACTION_PHASES = ("forward", "backward")
"""Phases that are reported with every action: one phase here."""
LEFT_OUT = -1
NUM_CALL_MARKS = 4
"""Of a call: when its start and the wait for it began and ended."""


class _CallFacts(NamedTuple):
    """What is kept of a call: without its tensors, which others may use when it has ended."""

    op: str
    axis: str
    ranks: tuple[int, ...]
    num_bytes: int
    communicator: str

    @property
    def name(self) -> str:
        return f"{self.op} {self.axis}, {self.num_bytes:,} bytes"


class RankRecorder:
    """Records a rank, from its first phase on.

    Attributes:
        num_left_out: records above the limit.
    """

    def __init__(self, clock: Clock, ranges: NamedRanges, *, most: int = MOST_RECORDS) -> None:
        self._clock = clock
        self._now = clock.now
        self._ranges = ranges
        self._num_left = most
        self.num_left_out = 0
        self._phases: list[tuple[int, str, Mark]] = []
        self._actions: list[tuple[Act, Mark, Mark]] = []
        self._blocks: list[tuple[str, Mark]] = []
        self._calls: list[tuple[_CallFacts, list[Mark]]] = []
        self._action: tuple[Act, Mark] | None = None
        self._is_block_open = False

    def phase(self, step: int, name: str) -> None:
        """A phase begins."""
        is_action = name in ACTION_PHASES
        last = self._phases[-1] if self._phases else None
        if is_action and last is not None and last[:2] == (step, ACTION_PHASES[0]):
            return
        if self._has_room():
            if last is not None:
                self._ranges.pop()
            self._phases.append((step, name, self._now()))
            self._ranges.push(f"step {step} {'actions' if is_action else name}")

    def begin_action(self, act: Act) -> None:
        """An action begins."""
        self._ranges.push(_range_name(act))
        self._action = act, self._now()

    def end_action(self) -> None:
        """It ends."""
        assert self._action is not None, "an action has begun"
        act, begin = self._action
        if self._has_room():
            self._actions.append((act, begin, self._now()))
        self._close_block()
        self._ranges.pop()
        self._action = None

    def block(self, name: str) -> None:
        """The forward or backward of a block begins, inside an action."""
        if self._action is None or not self._has_room():  # an evaluation, or a check of a step
            return
        self._blocks.append((name, self._now()))
        if self._action[0].kind == "F":  # in a backward the ranges of autograd are open
            self._close_block()
            self._ranges.push(name)
            self._is_block_open = True

    def _close_block(self) -> None:
        if self._is_block_open:
            self._ranges.pop()
            self._is_block_open = False

    def begin_call(self, call: Call) -> int:
        """A call is started: its number."""
        facts = _CallFacts(call.op, call.axis, call.ranks, payload_bytes(call), call.communicator)
        self._ranges.push(facts.name)
        if not self._has_room():
            return LEFT_OUT
        number = len(self._calls)
        self._calls.append((facts, [self._now()]))
        return number

    def call_started(self, number: int) -> None:
        """The rank goes on."""
        self._ranges.pop()
        self._mark_call(number)

    def begin_wait(self, number: int) -> None:
        """The rank waits for a call."""
        if number != LEFT_OUT:
            self._ranges.push(f"wait for {self._calls[number][0].name}")
        self._mark_call(number)

    def end_wait(self, number: int) -> None:
        """The rank has waited."""
        self._mark_call(number)
        if number != LEFT_OUT:
            self._ranges.pop()

    def _mark_call(self, number: int) -> None:
        if number != LEFT_OUT:
            self._calls[number][1].append(self._now())

    def _has_room(self) -> bool:
        if self._num_left:
            self._num_left -= 1
            return True
        self.num_left_out += 1
        return False

    def close(self) -> None:
        """End the last phase and all ranges; calls that are under way may still be waited for."""
        if self._phases:
            self._phases.append((self._phases[-1][0], STOP, self._now()))
        self._ranges.close()

    def records(self, header: RecordHeader) -> RankRecords:
        """Everything so far, in seconds of the clock of rank 0; waits until the work has ended.

        Args:
            header: with the offset of this rank's clock; without its origin.
        """
        origin_s = self._seconds(self._phases[0][2], header.offset_s)

        def read(mark: Mark) -> float:
            return self._seconds(mark, header.offset_s) - origin_s

        calls = []
        for facts, marks in list(self._calls):
            start, started = read(marks[0]), read(marks[1])
            is_waited_for = len(marks) == NUM_CALL_MARKS
            wait, waited = map(read, marks[2:]) if is_waited_for else (started, started)
            calls.append(CallRecord(*facts, start, started, wait, waited))
        return RankRecords(
            header=replace(header, origin_s=origin_s, num_left_out=self.num_left_out),
            phases=tuple(PhaseRecord(step, name, read(mark)) for step, name, mark in self._phases),
            actions=tuple(
                ActionRecord(str(act), read(begin), read(end)) for act, begin, end in self._actions
            ),
            blocks=tuple(BlockRecord(name, read(mark)) for name, mark in self._blocks),
            calls=tuple(calls),
        )

    def _seconds(self, mark: Mark, offset_s: float) -> float:
        return self._clock.seconds(mark) - offset_s


def _range_name(act: Act) -> str:
    meaning, _, _ = KIND_MEANING[act.kind].partition(":")
    return f"{act}: {meaning}, stage {act.stage}, micro-batch {act.mb}"
