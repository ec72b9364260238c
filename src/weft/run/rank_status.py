"""What every local rank is doing (step, phase, block, collective), on a board in shared memory that the launcher reads.

    rank 0 --- writes its slot ---+
    rank 1 --- writes its slot ---+---> StatusBoard (memory-mapped) ---> supervisor, `weft status`
    rank 2 --- writes its slot ---+

A slot has one writer and no lock: the numbers are aligned 8-byte words, which are written whole, and
`changed_ns` is written last. A reader may see the text of one call with the time of the next; the
diagnosis reads slots of ranks that do not move. The words and texts of the call that a device is in
have a writer of their own, the thread of the transport that looks at the device. Imports no torch.
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
NO_GROUP = 0
"""Number that further groups share."""
MAX_TEXTS = 4096
MAX_LOOK_AGE_S = 1.0
"""Age of a look at the device after which it says nothing: the thread that looks does not run."""

SLOT_BYTES = 8192
WORD_BYTES = 8
NUM_WORDS = 256
BLOCK_AT, CALL_AT, MEMBERS_AT, CALL_END = 2048, 2112, 2432, 4096
ON_DEVICE = 4096
"""How far behind those of the call that the host waits for the texts of the call on the device are."""
PID, ATTEMPT, STEP, PHASE, PROGRESS, CHANGED, NUM_STEPS = range(7)
WAITING, POSITION, GROUP = range(7, 10)
DEVICE_SEEN, DEVICE_POSITION, DEVICE_GROUP = range(10, 13)
DURATIONS_AT = 16
GROUPS_AT = DURATIONS_AT + NUM_DURATIONS


class ShownCall(Protocol):
    """The part of a collective or message (`weft.comm.transport.Call`) that the board shows; `count`
    is that of a call on a device.
    """

    @property
    def signature(self) -> str: ...
    @property
    def axis(self) -> str: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...
    @property
    def group_key(self) -> tuple[bool, tuple[int, ...]]: ...
    @property
    def count(self) -> int: ...


@dataclass(frozen=True)
class WaitingCall:
    """The collective or message that a rank waits for, or that its device is in: the host of a rank
    that makes no progress waits for its device then, in whatever line it stands.

    Attributes:
        text: operation, dtype, shape and axis: `all_reduce(sum) float32[4] over dp`.
        members: world ranks of its group; source and destination of a message.
        group: number that identifies the group.
        position: calls of the group that this rank had started before.
        is_on_device: whether the host has handed the call to its device and does not wait in it.
    """

    text: str
    members: tuple[int, ...]
    group: int
    position: int
    is_on_device: bool = False

    @property
    def has_known_members(self) -> bool:
        """Whether the board says who the members are and which of them have started the call: it has no
        place for the numbers of further groups, nor for the members of a very large one.
        """
        return self.group != NO_GROUP and bool(self.members)


@dataclass(frozen=True)
class RankSnapshot:
    """The slot of one rank at one moment.

    Attributes:
        step: the step it works on, the first is 1; 0 before.
        progress: grows with every change of phase or block and every call.
        changed_ns: time.monotonic_ns() of the last change.
        block: the block whose forward or backward began last; "" outside of them.
        waiting: the call that its host waits for, else the one that its device is in; None if there
            is none.
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
            waiting = _read_call(slot, words[POSITION], words[GROUP])
        elif time.monotonic_ns() - words[DEVICE_SEEN] < 1e9 * MAX_LOOK_AGE_S:
            position, group = words[DEVICE_POSITION], words[DEVICE_GROUP]
            waiting = _read_call(slot[ON_DEVICE:], position, group, is_on_device=True)
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

    `on_phase` and `on_block` are the callbacks of the training loop; `started`, `waiting`,
    `finished` and `on_device` are those of a `Comm` (`weft.comm.observe.CallMonitor`).
    """

    def __init__(self, slot: memoryview) -> None:
        self.slot = slot
        self._words = slot[: NUM_WORDS * WORD_BYTES].cast("q")
        self._phase: Phase = "start"
        self._step_began_ns = 0
        self._call_on_device: ShownCall | None = None
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
        # after the text and the numbers of the call: a reader that sees it finds this call there
        words[WAITING] = now_ns
        self._changed(now_ns)

    def on_device(self, call: ShownCall | None) -> None:
        """The oldest call that the device has not completed; from the thread that looks at it."""
        words = self._words
        if call is not self._call_on_device:
            self._call_on_device = call
            # before the text changes: what is read meanwhile is no call
            words[DEVICE_SEEN] = 0
        if call is None:
            return
        if not words[DEVICE_SEEN]:
            text = _call_text(call)
            start = ON_DEVICE + CALL_AT
            self.slot[start : start + len(text)] = text
            words[DEVICE_GROUP] = words[self._group_words[call.group_key]]
            words[DEVICE_POSITION] = call.count
        words[DEVICE_SEEN] = time.monotonic_ns()

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
        last place, which has the number NO_GROUP and is not shown.
        """
        used = len(set(self._group_words.values()))
        index = GROUPS_AT + 2 * min(used, NUM_GROUPS)
        if used < NUM_GROUPS:
            self._words[index] = 1 + zlib.crc32(repr(call.group_key).encode())
        self._group_words[call.group_key] = index
        return index

    def _add_text(self, call: ShownCall) -> bytes:
        """Text and members of a call, as one piece of the slot."""
        # shapes may differ in every step; the texts of a thousand steps are not worth their memory
        if len(self._texts) >= MAX_TEXTS:
            self._texts.clear()
        text = _call_text(call)
        self._texts[call.signature, call.axis, call.ranks] = text
        return text


def _call_text(call: ShownCall) -> bytes:
    """What a call is, in MEMBERS_AT - CALL_AT bytes, and its members."""
    room = MEMBERS_AT - CALL_AT
    described = _text(f"{call.signature} over {call.axis}", room)
    members = " ".join(map(str, call.ranks)).encode()
    if len(members) >= CALL_END - MEMBERS_AT:
        members = b""
    return described.ljust(room, b"\0") + members + b"\0"


def _read_call(
    texts: memoryview, position: int, group: int, *, is_on_device: bool = False
) -> WaitingCall:
    """The call whose texts are where those of the first call of a slot are."""
    members = _read_text(texts, MEMBERS_AT, CALL_END)
    return WaitingCall(
        text=_read_text(texts, CALL_AT, MEMBERS_AT),
        members=tuple(int(member) for member in members.split()),
        group=group,
        position=position,
        is_on_device=is_on_device,
    )


def _text(text: str, size: int) -> bytes:
    """At most `size` bytes, with a zero byte at the end."""
    return text.encode("ascii", "replace")[: size - 1] + b"\0"


def _read_text(slot: memoryview, start: int, end: int) -> str:
    text, _, _ = bytes(slot[start:end]).partition(b"\0")
    return text.decode("ascii", "replace")
