"""Recorder of one rank: keeps when phases, actions, blocks and calls begin and end, and reads the clock's marks at the end.

A record is a list append and two or three marks of the clock; nothing is formatted, written or waited for before
`records`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from weft.comm.transport import Call
from weft.profiler.clocks import Mark, ProfileClock
from weft.profiler.ranges import NamedRanges
from weft.profiler.rank_records import (
    MOST_RECORDS,
    STOP,
    ActionRecord,
    BlockStart,
    CallRecord,
    PhaseRecord,
    RankRecords,
    RecordHeader,
)
from weft.schedule.actions import KIND_MEANING, Act

ACTION_PHASES = ("forward", "backward")
"""Phases that are reported with every action: one phase here."""
NUM_WAIT_MARKS = 2
"""Begin and end; fewer where the call is waited for later."""


class RankRecorder:
    """Records a rank, from its first phase on.

    Attributes:
        num_left_out: records above the limit.
    """

    def __init__(
        self, clock: ProfileClock, ranges: NamedRanges, *, most: int = MOST_RECORDS
    ) -> None:
        self._clock = clock
        self._now = clock.now
        self._ranges = ranges
        self._num_left = most
        self.num_left_out = 0
        self._phases: list[tuple[int, str, Mark]] = []
        self._actions: list[tuple[Act, Mark, Mark]] = []
        self._blocks: list[tuple[str, Mark]] = []
        self._calls: list[list[Any]] = []
        self._action: tuple[Act, Mark] | None = None
        self._is_block_open = False

    def phase(self, step: int, name: str) -> None:
        """A phase begins."""
        is_action = name in ACTION_PHASES
        last = self._phases[-1] if self._phases else None
        if is_action and last is not None and last[:2] == (step, ACTION_PHASES[0]):
            return
        if self._has_room():
            self._phases.append((step, name, self._now()))
            if self._ranges.are_seen():
                self._ranges.close()
                self._ranges.push(f"step {step} {'actions' if is_action else name}")

    def begin_action(self, act: Act) -> None:
        """An action begins."""
        if self._ranges.are_seen():
            self._ranges.push(_range_name(act))
        self._action = act, self._now()

    def end_action(self) -> None:
        """Record the end of the action under way."""
        assert self._action is not None, "an action has begun"
        act, begin = self._action
        if self._has_room():
            self._actions.append((act, begin, self._now()))
        self._close_block()
        if self._ranges.are_seen():
            self._ranges.pop()
        self._action = None

    def block(self, name: str) -> None:
        """The forward or backward of a block begins, inside an action."""
        if self._action is None or not self._has_room():  # an evaluation, or a check of a step
            return
        self._blocks.append((name, self._now()))
        if (
            self._ranges.are_seen() and self._action[0].kind == "F"
        ):  # in a backward the ranges of autograd are open
            self._close_block()
            self._ranges.push(name)
            self._is_block_open = True

    def _close_block(self) -> None:
        if self._is_block_open:
            self._ranges.pop()
            self._is_block_open = False

    def begin_call(self, call: Call) -> Mark:
        """The time before a call is handed over: nothing else, as other ranks may wait for it."""
        if self._ranges.are_seen():
            self._ranges.push(_call_name(call.op, call.axis))
        return self._now()

    def call_started(self, call: Call, begin: Mark) -> list[Any]:
        """The record of a call: without its tensors, which others may use when it has ended."""
        end = self._now()
        if self._ranges.are_seen():
            self._ranges.pop()
        tensor = call.input if call.input is not None else call.output
        num_bytes = 0 if tensor is None else tensor.nbytes
        record = [call.op, call.axis, call.ranks, num_bytes, call.communicator, begin, end]
        if self._has_room():
            self._calls.append(record)
        return record

    def begin_wait(self, record: list[Any]) -> None:
        """The rank waits for a call."""
        if self._ranges.are_seen():
            op, axis, *_ = record
            self._ranges.push(f"wait for {_call_name(op, axis)}")
        record.append(self._now())

    def end_wait(self, record: list[Any]) -> None:
        """The rank has waited."""
        record.append(self._now())
        if self._ranges.are_seen():
            self._ranges.pop()

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
        for op, axis, ranks, num_bytes, communicator, *marks in self._calls:
            start, started, *waits = map(read, marks)
            wait, waited = waits if len(waits) == NUM_WAIT_MARKS else (started, started)
            calls.append(
                CallRecord(op, axis, ranks, num_bytes, communicator, start, started, wait, waited)
            )
        return RankRecords(
            header=replace(header, origin_s=origin_s, num_left_out=self.num_left_out),
            phases=tuple(PhaseRecord(step, name, read(mark)) for step, name, mark in self._phases),
            actions=tuple(
                ActionRecord(str(act), read(begin), read(end)) for act, begin, end in self._actions
            ),
            blocks=tuple(BlockStart(name, read(mark)) for name, mark in self._blocks),
            calls=tuple(calls),
        )

    def _seconds(self, mark: Mark, offset_s: float) -> float:
        return self._clock.seconds(mark) - offset_s


def _range_name(act: Act) -> str:
    meaning, _, _ = KIND_MEANING[act.kind].partition(":")
    return f"{act}: {meaning}, stage {act.stage}, micro-batch {act.mb}"


def _call_name(op: str, axis: str) -> str:
    return f"{op} {axis}"
