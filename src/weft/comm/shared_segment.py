"""Memory that the ranks of a group on one host share: a counter of rounds, and two halves of a slot, for each member."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import threading

import torch
from torch import Tensor

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
            if len(self._views) >= MAX_VIEWS:
                self._views.clear()
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
