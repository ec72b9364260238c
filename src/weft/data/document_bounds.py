"""Where documents begin in a token stream: ascending numbers, in memory or read on demand from an .idx file."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]

BOUND: np.dtype[Any] = np.dtype("<i8")
BLOCK = 512
"""Bounds that are read at once: a page."""
CACHED_BLOCKS = 1024
"""Blocks that stay in memory, 4 MiB: the first steps of every binary search are always among them.
"""
SCANNED_BOUNDS = 2**20
"""Bounds that `longest_document` reads at once."""


@dataclass(frozen=True)
class BoundsFile:
    """Bounds that stay on the disk.

    Attributes:
        sha256: of the file, as the metadata of its folder state it.
    """

    path: Path
    length: int
    sha256: str

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int, /) -> int: ...
    @overload
    def __getitem__(self, index: slice, /) -> Ints: ...
    def __getitem__(self, index: int | slice, /) -> int | Ints:
        if isinstance(index, slice):
            start, stop, _ = index.indices(self.length)
            count = max(stop - start, 0)
            return self._read(start, count)
        number, offset = divmod(index, BLOCK)
        block = self._cached_block(number)
        return int(block[offset])

    @cached_property
    def _cached_block(self) -> Callable[[int], Ints]:
        def read_block(number: int) -> Ints:
            return self._read(number * BLOCK, BLOCK)

        return lru_cache(CACHED_BLOCKS)(read_block)

    def _read(self, start: int, count: int) -> Ints:
        return np.fromfile(self.path, BOUND, count, offset=start * BOUND.itemsize)


Bounds = Ints | BoundsFile


def bounds_between(bounds: Bounds, low: int, high: int) -> Ints:
    """The bounds above `low`, up to and including `high`."""
    first = bisect_right(bounds, low)
    last = bisect_right(bounds, high, lo=first)
    return bounds[first:last]


def longest_document(bounds: Bounds) -> tuple[int, int]:
    """Number and length in tokens of the longest document; the bounds are read in parts."""
    best_number, best_length = 0, 0
    for first in range(0, len(bounds) - 1, SCANNED_BOUNDS):
        stop = first + SCANNED_BOUNDS + 1
        lengths = np.diff(bounds[first:stop])
        index = int(lengths.argmax())
        length = int(lengths[index])
        if length > best_length:
            best_number = first + index
            best_length = length
    return best_number, best_length


def sha256_of(bounds: Bounds) -> str:
    """SHA-256 of bounds as an .idx file has them; of a file what its metadata say."""
    if isinstance(bounds, BoundsFile):
        return bounds.sha256
    return hashlib.sha256(np.ascontiguousarray(bounds, dtype=BOUND).data).hexdigest()
