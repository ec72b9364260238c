"""Memory that the ranks of a group on one host share: a segment, the rounds in which its members use it, waiting for them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import threading
import time
import zlib
from collections.abc import Generator, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.in_flight import BackendCall
from weft.comm.signature import comparable_text

# Note [Segment]
#
#     counters   member 0 | member 1 | ...            rounds that each has published, a cache line each
#     slots      member 0: half 0, half 1 | member 1: half 0, half 1 | ...
#     half       tag of the call, a number, data
#
# The memory is a memfd: it has no name, so nothing is left of it when the last process that has mapped it ends, however it
# ends. It is no file of /dev/shm and does not count there; its pages are allocated when they are first written. Larger
# tensors pass through it piece by piece: up to 8 members a half has 1 MiB, which stays in the cache of a core while it is
# reduced (halves of 4 MiB are slower); a segment has at most SEGMENT_BYTES, whatever the number of members.
#
# Note [Order of memory]
# Data are written before the counter that publishes them, and read after it. x86 keeps the order of stores and of loads.
# Elsewhere a lock is taken and released in between: its release orders what came before, its acquisition what follows.
# A counter is one aligned word of 64 bits with one writer, so it is read and written whole.

SEGMENT_BYTES = 2**25
MAX_HALF_BYTES = 2**20
LINE_BYTES = 64
WORD_BYTES = 8
PAGE_BYTES = 4096
WORDS_OF_LINE = LINE_BYTES // WORD_BYTES
MAX_VIEWS = 1024
KEEPS_ORDER = platform.machine() == "x86_64"


def half_bytes(num_members: int) -> int:
    """Size of half a slot."""
    share = SEGMENT_BYTES // (2 * num_members)
    return max(PAGE_BYTES, min(MAX_HALF_BYTES, share - share % PAGE_BYTES))


class SharedSegment:
    """The mapping of one member.

    Args:
        file: descriptor of the memfd; it may be closed afterwards.
        num_members: of the group.

    Attributes:
        words: everything as integers of 64 bits; `words[WORDS_OF_LINE * m]` is the counter of member m.
        headers: `headers[half][m]` is the index in `words` of the tag of a half; a number follows it.
        counters: their addresses.
        addresses: `addresses[half][m]` is where the data of a half begin.
        capacity: bytes of data of a half.
    """

    def __init__(self, file: int, num_members: int) -> None:
        half_size = half_bytes(num_members)
        self._memory = mmap.mmap(file, segment_bytes(num_members))
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.words = memoryview(self._memory).cast("q")
        self.capacity = half_size - LINE_BYTES
        slots = _counter_bytes(num_members)
        headers = [
            [slots + (2 * member + half) * half_size for member in range(num_members)]
            for half in (0, 1)
        ]
        self.headers = [[start // WORD_BYTES for start in row] for row in headers]
        self._data = [[start + LINE_BYTES for start in row] for row in headers]
        self.addresses = [[address + start for start in row] for row in self._data]
        self.counters = [address + LINE_BYTES * member for member in range(num_members)]
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._views: dict[tuple[int, torch.dtype, int, int], list[Tensor]] = {}
        self._lock = threading.Lock()

    @staticmethod
    def create(num_members: int) -> int:
        """File descriptor of a new segment.

        Raises:
            OSError: there is no memory of this kind, or a limit is reached.
        """
        file = os.memfd_create("weft ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, segment_bytes(num_members))
        except OSError:
            os.close(file)
            raise
        return file

    def views(self, half: int, dtype: torch.dtype, *, start: int, num_bytes: int) -> list[Tensor]:
        """The same bytes of the data of all members' halves, as flat tensors."""
        key = (half, dtype, start, num_bytes)
        found = self._views.get(key)
        if found is None:
            # a program whose sizes differ in every call would keep a view for each of them
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
            # the views are cached: made under inference mode they could not be written outside of it later
            with torch.inference_mode(False):
                places = [data + start for data in self._data[half]]
                found = [self._bytes[place : place + num_bytes].view(dtype) for place in places]
            self._views[key] = found
        return found

    def fence(self) -> None:
        """See Note [Order of memory]; not needed if KEEPS_ORDER."""
        with self._lock:
            pass


def segment_bytes(num_members: int) -> int:
    """Size of the segment of a group, which all its members have together."""
    return _counter_bytes(num_members) + 2 * num_members * half_bytes(num_members)


def _counter_bytes(num_members: int) -> int:
    return -(-LINE_BYTES * num_members // PAGE_BYTES) * PAGE_BYTES


# Note [Futexes]
# A futex is a word of 32 bits in memory that processes share. `wait_for_change` sleeps in the kernel while the word has the value
# that was seen last; if it has changed before the kernel looks, it returns at once, so no wake-up is lost. `wake` wakes
# all that sleep at a word, through any mapping of it. Counters here have 64 bits, so that they never start again; the
# kernel looks at their lower half, which comes first on the processors below.

SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
"""Number of the system call, on processors whose words begin with their lower half."""
SYS_FUTEX_WAITV = 449
"""Waits for one of several words; since Linux 5.16, and not in every sandbox."""
FUTEX_WAIT, FUTEX_WAKE = 0, 1
FUTEX2_SIZE_U32 = 2
MAX_WORDS = 128
EVERYONE = 2**31 - 1
ONE_OF_SEVERAL_S = 0.001
"""How long to sleep at the first of several words where the kernel cannot wait for all of them."""


class SeenWord(NamedTuple):
    """A counter in shared memory, and the value that was seen last."""

    address: int
    value: int


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_int64), ("nanoseconds", ctypes.c_int64))


class _WaitedWord(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("flags", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


_NUMBER = SYS_FUTEX.get(platform.machine(), 0)
_SYSCALL = ctypes.CDLL(None, use_errno=True).syscall
_SYSCALL.restype = ctypes.c_long
_SYSCALL.argtypes = (ctypes.c_long,) * 7
_WITHOUT_WAITV = (errno.ENOSYS, errno.EPERM)


def has_futexes() -> bool:
    """Whether this system has them."""
    return platform.system() == "Linux" and _NUMBER > 0


def wake(address: int) -> None:
    """Wake all that wait at a word."""
    _SYSCALL(_NUMBER, address, FUTEX_WAKE, EVERYONE, 0, 0, 0)


def wait_for_change(words: Sequence[SeenWord], timeout_s: float) -> None:
    """Sleep until one of the words may have changed, for at most `timeout_s`; the caller looks."""
    if len(words) > 1 and _wait_for_one(words[:MAX_WORDS], timeout_s):
        return
    if len(words) > 1:
        timeout_s = min(timeout_s, ONE_OF_SEVERAL_S)
    timespec = _timespec(timeout_s)
    address, value = words[0]
    low_half = value & 0xFFFFFFFF
    _SYSCALL(_NUMBER, address, FUTEX_WAIT, low_half, ctypes.addressof(timespec), 0, 0)


def _wait_for_one(words: Sequence[SeenWord], timeout_s: float) -> bool:
    """Sleep until one of several words may have changed; False where the kernel has no such call."""
    waiters = (_WaitedWord * len(words))(
        *(_WaitedWord(word.value & 0xFFFFFFFF, word.address, FUTEX2_SIZE_U32, 0) for word in words)
    )
    # this call takes a time of the clock, and the older one above a duration
    deadline = _timespec(time.monotonic() + timeout_s)
    status = _SYSCALL(
        SYS_FUTEX_WAITV,
        ctypes.addressof(waiters),
        len(words),
        0,
        ctypes.addressof(deadline),
        time.CLOCK_MONOTONIC,
        0,
    )
    return not (status < 0 and ctypes.get_errno() in _WITHOUT_WAITV)


def _timespec(seconds: float) -> _Timespec:
    whole = int(seconds)
    return _Timespec(whole, int(1e9 * (seconds - whole)))


# Note [Rounds]
# All calls of a group are one sequence of rounds, the same on all members. In round r a member writes into half r % 2 of
# its slot, publishes r, waits until all have published r, and reads their halves. That it has read them is seen when it
# publishes r + 1: all do so before any of them writes into that half again, in round r + 2.
#
#     member 0   write half 0   publish 2  . . . . . . . . .  read half 0 of member 1    write half 1   publish 3
#     member 1                  write half 0   publish 2      read half 0 of member 0    . . .
#
# A rank that has written goes on with its program, until it waits for the call: others do not hold it up.

NUM_YIELDS = 40

Steps = Generator[int | BackendCall, None, None]
"""A call as a generator: it writes the own half and yields the tag to publish it with, and is resumed when
the halves of all members may be read. Tags are equal on members that are in the same part of the same call.
In a group on several hosts it also yields calls between hosts, and is resumed when they are complete.
"""


class UnequalCallsError(RuntimeError):
    """Members are in different calls, whose signatures were not compared first."""


class Rounds:
    """The rounds of one member.

    Attributes:
        index, size: place of this member, and number of members.
        number: of the current round; the first is 1.
        half: half of the slots in the current round.
        awaited: the first member that was not seen to have published the round; `size` if all were.
    """

    def __init__(self, segment: SharedSegment, index: int, size: int) -> None:
        self.segment = segment
        self.index, self.size = index, size
        self.everyone = range(size)
        self.half = 0
        self.awaited = size
        self.number = 0
        self._tag = 0

    def begin(self) -> int:
        """Begin the next round; the half that this member may write and then reads of all."""
        self.number += 1
        self.half = self.number & 1
        return self.half

    def publish(self, tag: int) -> None:
        """Let the others read this member's half; it has read theirs of the round before."""
        segment, index = self.segment, self.index
        # before the counter, as the data: who sees the counter sees the tag of this round
        segment.words[segment.headers[self.half][index]] = self._tag = tag
        self.awaited = 0
        if not KEEPS_ORDER:
            segment.fence()
        segment.words[WORDS_OF_LINE * index] = self.number
        # after the counter: a member that fell asleep before sees the new value when it wakes
        wake(segment.counters[index])

    def is_complete(self) -> bool:
        """Whether the halves of all members may be read.

        Raises:
            UnequalCallsError: one of them is in another call.
        """
        if self.awaited == self.size:
            return True
        segment = self.segment
        words = segment.words
        while words[WORDS_OF_LINE * self.awaited] >= self.number:
            self.awaited += 1
            if self.awaited == self.size:
                if not KEEPS_ORDER:
                    segment.fence()
                # read before this member publishes again: until then none of them can be overwritten
                tags = [words[header] for header in segment.headers[self.half]]
                if tags.count(self._tag) < self.size:
                    raise UnequalCallsError("members called different operations, shapes or dtypes")
                return True
        return False

    def spin(self) -> bool:
        """Yield the core some times; whether the member that is waited for has published."""
        words, counter = self.segment.words, WORDS_OF_LINE * min(self.awaited, self.size - 1)
        for _ in range(NUM_YIELDS):
            if words[counter] >= self.number:
                return True
            os.sched_yield()
        return False

    def awaited_word(self) -> SeenWord | None:
        """The counter of the member that is waited for; None if `is_complete` may find the round so."""
        if self.awaited == self.size:
            return None
        # the kernel compares it again before it sleeps: a publication in between is not missed
        value = self.segment.words[WORDS_OF_LINE * self.awaited]
        if value >= self.number:
            return None
        return SeenWord(self.segment.counters[self.awaited], value)

    def write_number(self, number: int) -> None:
        """A number for the others, beside the tag of the own half."""
        self.segment.words[self.segment.headers[self.half][self.index] + 1] = number

    def numbers(self) -> list[int]:
        """The numbers of all members."""
        words = self.segment.words
        return [words[header + 1] for header in self.segment.headers[self.half]]


@lru_cache(maxsize=1024)
def tag_of(signature: str) -> int:
    """The first tag of a call; those of its later rounds follow."""
    return zlib.crc32(comparable_text(signature).encode()) << 24
