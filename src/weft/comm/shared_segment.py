"""Memory that the ranks of a group on one host share: a counter of rounds, and two halves of a slot, for each member."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

import torch
from torch import Tensor

from weft.comm import futex

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
        capacity: bytes of data of a half.
    """

    def __init__(self, file: int, num_members: int) -> None:
        self._half_bytes = half_bytes(num_members)
        self._slots_at = -(-LINE_BYTES * num_members // PAGE_BYTES) * PAGE_BYTES
        num_bytes = _num_bytes(num_members)
        self._memory = mmap.mmap(file, num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.words = memoryview(self._memory).cast("q")
        self.capacity = self._half_bytes - LINE_BYTES
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._fence = threading.Lock()

    @staticmethod
    def create(num_members: int) -> int:
        """File descriptor of a new segment.

        Raises:
            OSError: there is no memory of this kind, or a limit is reached.
        """
        file = os.memfd_create("weft ranks", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, _num_bytes(num_members))
        except OSError:
            os.close(file)
            raise
        return file

    def data_address(self, member: int, half: int) -> int:
        """Where the data of a half begin."""
        return self.address + self._header_at(member, half) + LINE_BYTES

    def header(self, member: int, half: int) -> int:
        """Index in `words` of the tag of a half; a number follows it."""
        return self._header_at(member, half) // WORD_BYTES

    def view(self, member: int, half: int, dtype: torch.dtype) -> Tensor:
        """The data of a half as a flat tensor."""
        key = (member, half, dtype)
        found = self._views.get(key)
        if found is None:
            start = self._header_at(member, half) + LINE_BYTES
            with torch.inference_mode(False):
                found = self._bytes[start : start + self.capacity].view(dtype)
            self._views[key] = found
        return found

    def publish(self, member: int, round_number: int) -> None:
        """Let the others see that a member has written its part of a round, and read the one before."""
        self.fence()
        self.words[WORDS_OF_LINE * member] = round_number
        futex.wake(self.counter_address(member))

    def counter_address(self, member: int) -> int:
        """Address of the counter of a member."""
        return self.address + LINE_BYTES * member

    def fence(self) -> None:
        """See Note [Order of memory]."""
        with self._fence:
            pass

    def _header_at(self, member: int, half: int) -> int:
        return self._slots_at + (2 * member + half) * self._half_bytes


def _num_bytes(num_members: int) -> int:
    slots_at = -(-LINE_BYTES * num_members // PAGE_BYTES) * PAGE_BYTES
    return slots_at + 2 * num_members * half_bytes(num_members)
