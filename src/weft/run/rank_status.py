"""What every local rank is doing (step, phase, block, collective), on a board in shared memory that the launcher reads.

    rank 0 --- writes its slot ---+
    rank 1 --- writes its slot ---+---> StatusBoard (memory-mapped) ---> supervisor, `weft status`
    rank 2 --- writes its slot ---+

A slot has one writer and no lock: the numbers are aligned 8-byte words, which are written whole, and
`changed_ns` is written last. A reader may see the text of one call with the time of the next; the
diagnosis reads slots of ranks that do not move. Imports no torch.
"""

from __future__ import annotations

import mmap
import os
import stat
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

Phase = Literal[
    "start",
    "data",
    "forward",
    "backward",
    "reduce",
    "update",
    "exchange",
    "evaluate",
    "save",
    "end",
]
"""What a rank does: building the model; reading a batch; the actions of the schedule; reducing
gradients and statistics; the optimizer; the exchange between sites; evaluation; saving; the end of a step (events are written)
and of the run.
"""
PHASES: tuple[Phase, ...] = get_args(Phase)

OnPhase = Callable[[int, Phase], None]
"""Called by a rank with its step (the first is 1; 0 before) and the phase that begins."""

OnBlock = Callable[[str], None]
"""Called by a rank with the name of the block whose forward or backward begins."""

NUM_DURATIONS = 128
"""Step times that are kept per rank."""
NUM_GROUPS = 40
"""Groups of ranks whose calls are counted per rank."""
MAX_TEXTS = 4096

SLOT_BYTES = 4096
WORD_BYTES = 8
NUM_WORDS = 256
BLOCK_AT, CALL_AT, MEMBERS_AT = 2048, 2112, 2432
PID, ATTEMPT, STEP, PHASE, PROGRESS, CHANGED, WAITING, POSITION, GROUP, NUM_STEPS = range(10)
DURATIONS_AT = 16
GROUPS_AT = DURATIONS_AT + NUM_DURATIONS


class ShownCall(Protocol):
    """The part of a collective or message (`weft.comm.transport.Call`) that the board shows."""

    @property
    def signature(self) -> str: ...
    @property
    def axis(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def group_key(self) -> tuple[bool, tuple[int, ...]]: ...


@dataclass(frozen=True)
class WaitingCall:
    """The collective or message that a rank waits for.

    Attributes:
        text: operation, dtype, shape and axis: `all_reduce(sum) float32[4] over dp`.
        members: world ranks of its group; source and destination of a message.
        group: number that identifies the group.
        position: calls of the group that this rank had started before.
        since_ns: time.monotonic_ns() at which the wait began.
    """

    text: str
    members: tuple[int, ...]
    group: int
    position: int
    since_ns: int


@dataclass(frozen=True)
class RankSnapshot:
    """The slot of one rank at one moment.

    Attributes:
        step: the step it works on, the first is 1; 0 before.
        progress: grows with every change of phase or block and every call.
        changed_ns: time.monotonic_ns() of the last change.
        block: the block whose forward or backward began last; "" outside of them.
        waiting: the call that it waits for; None if it waits for none.
        num_started: group -> calls of the group that it has started.
        step_times_s: durations of its last steps, without evaluation and saves.
    """

    rank: int
    pid: int
    attempt: int
    step: int
    phase: Phase
    progress: int
    changed_ns: int
    block: str
    waiting: WaitingCall | None
    num_started: dict[int, int]
    step_times_s: tuple[float, ...]

    @property
    def place(self) -> str:
        """`step 120, backward of layer5`; "start" before the first step."""
        if self.step == 0:
            return self.phase
        text = f"step {self.step}, {self.phase}"
        is_in_block = self.phase in ("forward", "backward", "evaluate") and self.block
        return f"{text} of {self.block}" if is_in_block else text


class StatusBoard:
    """The slots of all local ranks, in a file that they and their launcher map into memory."""

    def __init__(self, file: int, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._map = mmap.mmap(file, num_ranks * SLOT_BYTES)
        self._view = memoryview(self._map)

    @staticmethod
    def create(path: Path, num_ranks: int) -> StatusBoard:
        """A new board in a private file."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(file, num_ranks * SLOT_BYTES)
            return StatusBoard(file, num_ranks)
        finally:
            os.close(file)

    @staticmethod
    def in_memory(num_ranks: int) -> StatusBoard:
        """A new board without a file, for ranks of this process."""
        file = os.memfd_create("weft-board", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, num_ranks * SLOT_BYTES)
            return StatusBoard(file, num_ranks)
        finally:
            os.close(file)

    @staticmethod
    def open(path: Path) -> StatusBoard:
        """The board in an existing file.

        Raises:
            OSError: there is none.
            ValueError: the file is no board.
        """
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{path} is no status board")
            num_ranks, rest = divmod(status.st_size, SLOT_BYTES)
            if rest or not num_ranks:
                raise ValueError(f"{path} is no status board")
            return StatusBoard(file, num_ranks)
        finally:
            os.close(file)

    def rank(self, rank: int) -> RankStatus:
        """The slot of a rank, to be written by that rank only."""
        return RankStatus(self._slot(rank))

    def clear(self) -> None:
        """Empty all slots; no rank may run."""
        self._map[:] = bytes(len(self._map))

    def read(self, rank: int) -> RankSnapshot:
        """What a rank was doing at its last change."""
        slot = self._slot(rank)
        words = slot[: NUM_WORDS * WORD_BYTES].cast("q")
        waiting: WaitingCall | None = None
        if words[WAITING]:
            members = _read_text(slot, MEMBERS_AT, SLOT_BYTES)
            waiting = WaitingCall(
                text=_read_text(slot, CALL_AT, MEMBERS_AT),
                members=tuple(int(member) for member in members.split()),
                group=words[GROUP],
                position=words[POSITION],
                since_ns=words[WAITING],
            )
        num_started: dict[int, int] = {}
        for index in range(GROUPS_AT, GROUPS_AT + 2 * NUM_GROUPS, 2):
            if words[index]:
                num_started[words[index]] = words[index + 1]
        num_times = min(words[NUM_STEPS], NUM_DURATIONS)
        times = words[DURATIONS_AT : DURATIONS_AT + num_times]
        return RankSnapshot(
            rank=rank,
            pid=words[PID],
            attempt=words[ATTEMPT],
            step=words[STEP],
            phase=PHASES[words[PHASE]],
            progress=words[PROGRESS],
            changed_ns=words[CHANGED],
            block=_read_text(slot, BLOCK_AT, CALL_AT),
            waiting=waiting,
            num_started=num_started,
            step_times_s=tuple(1e-9 * time_ns for time_ns in times),
        )

    def progress(self, rank: int) -> int:
        """The progress counter of a rank alone."""
        start = rank * SLOT_BYTES + PROGRESS * WORD_BYTES
        return int.from_bytes(self._map[start : start + WORD_BYTES], "little")

    def _slot(self, rank: int) -> memoryview:
        return self._view[rank * SLOT_BYTES : (rank + 1) * SLOT_BYTES]


class RankStatus:
    """One rank's slot, written by that rank; every method takes a few microseconds or less.

    `on_phase` and `on_block` are the callbacks of the training loop; `started`, `waiting` and
    `finished` are those of a `Comm` (`weft.comm.observe.CallMonitor`).
    """

    def __init__(self, slot: memoryview) -> None:
        self.slot = slot
        self._words = slot[: NUM_WORDS * WORD_BYTES].cast("q")
        self._phase: Phase = "start"
        self._step_began_ns = 0
        self._group_words: dict[tuple[bool, tuple[int, ...]], int] = {}
        self._texts: dict[tuple[str, str, tuple[int, ...]], bytes] = {}
        self._block_texts: dict[str, bytes] = {}

    @property
    def place(self) -> tuple[int, Phase]:
        """The current step and phase."""
        return self._words[STEP], self._phase

    def begin(self, *, attempt: int) -> None:
        """This process is the rank from now on."""
        self._words[PID] = os.getpid()
        self._words[ATTEMPT] = attempt
        self._changed(time.monotonic_ns())

    def on_phase(self, step: int, phase: Phase) -> None:
        """A phase begins. The time from "data" to the end of "update" is recorded as a step time."""
        now_ns = time.monotonic_ns()
        words = self._words
        if self._phase == "update" and phase != "update":
            self._record_step_time(now_ns - self._step_began_ns)
        if phase == "data":
            self._step_began_ns = now_ns
        self._phase = phase
        words[STEP] = step
        words[PHASE] = PHASES.index(phase)
        self._changed(now_ns)

    def on_block(self, name: str) -> None:
        """The forward or backward of a block begins."""
        text = self._block_texts.get(name)
        if text is None:
            text = _text(name, CALL_AT - BLOCK_AT)
            self._block_texts[name] = text
        self.slot[BLOCK_AT : BLOCK_AT + len(text)] = text
        self._changed(time.monotonic_ns())

    def started(self, call: ShownCall) -> int:
        """A call is about to start; its position among those of its group."""
        index = self._group_words.get(call.group_key)
        if index is None:
            index = self._add_group(call)
        position: int = self._words[index + 1]
        self._words[index + 1] = position + 1
        self._words[PROGRESS] += 1
        return position

    def waiting(self, call: ShownCall, position: int) -> None:
        """This rank waits for a call."""
        key = (call.signature, call.axis, call.ranks)
        text = self._texts.get(key)
        if text is None:
            text = self._add_text(call)
        self.slot[CALL_AT : CALL_AT + len(text)] = text
        words = self._words
        now_ns = time.monotonic_ns()
        words[GROUP] = words[self._group_words[call.group_key]]
        words[POSITION] = position
        words[WAITING] = now_ns
        self._changed(now_ns)

    def finished(self) -> None:
        """The call that this rank waited for is complete, or has failed."""
        self._words[WAITING] = 0
        self._changed(time.monotonic_ns())

    def _changed(self, now_ns: int) -> None:
        self._words[PROGRESS] += 1
        self._words[CHANGED] = now_ns

    def _record_step_time(self, time_ns: int) -> None:
        number = self._words[NUM_STEPS]
        self._words[DURATIONS_AT + number % NUM_DURATIONS] = time_ns
        self._words[NUM_STEPS] = number + 1

    def _add_group(self, call: ShownCall) -> int:
        """The words of a new group: its number and its calls. Groups beyond NUM_GROUPS share the
        last place, which has number 0 and is not shown.
        """
        used = len(set(self._group_words.values()))
        index = GROUPS_AT + 2 * min(used, NUM_GROUPS)
        if used < NUM_GROUPS:
            self._words[index] = 1 + zlib.crc32(repr(call.group_key).encode())
        self._group_words[call.group_key] = index
        return index

    def _add_text(self, call: ShownCall) -> bytes:
        """Text and members of a call, as one piece of the slot."""
        if len(self._texts) >= MAX_TEXTS:
            self._texts.clear()
        room = MEMBERS_AT - CALL_AT
        described = _text(f"{call.signature} over {call.axis}", room)
        members = " ".join(map(str, call.ranks)).encode()
        room_of_members = SLOT_BYTES - MEMBERS_AT - 1
        if len(members) > room_of_members:
            members = b""
        text = described.ljust(room, b"\0") + members + b"\0"
        key = (call.signature, call.axis, call.ranks)
        self._texts[key] = text
        return text


def _text(text: str, size: int) -> bytes:
    """At most `size` bytes, with a zero byte at the end."""
    return text.encode("ascii", "replace")[: size - 1] + b"\0"


def _read_text(slot: memoryview, start: int, end: int) -> str:
    text, _, _ = bytes(slot[start:end]).partition(b"\0")
    return text.decode("ascii", "replace")
