"""Owns where documents begin: ascending numbers, in memory or in an .idx file of which only what is asked for is read."""

from __future__ import annotations

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
KEPT_BLOCKS = 1024
"""Blocks that stay in memory, 4 MiB: the first steps of every search are always among them."""


@dataclass(frozen=True)
class BoundsFile:
    """Bounds that stay on the disk."""

    path: Path
    length: int

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, place: int, /) -> int: ...
    @overload
    def __getitem__(self, place: slice, /) -> Ints: ...
    def __getitem__(self, place: int | slice, /) -> int | Ints:
        if isinstance(place, slice):
            start, stop, _ = place.indices(self.length)
            return self._read(start, max(stop - start, 0))
        return int(self._block(place // BLOCK)[place % BLOCK])

    @cached_property
    def _block(self) -> Callable[[int], Ints]:
        return lru_cache(KEPT_BLOCKS)(lambda number: self._read(number * BLOCK, BLOCK))

    def _read(self, start: int, count: int) -> Ints:
        return np.fromfile(self.path, BOUND, count, offset=start * BOUND.itemsize)


Bounds = Ints | BoundsFile


def between(bounds: Bounds, low: int, high: int) -> Ints:
    """The bounds above `low`, up to and with `high`."""
    first = bisect_right(bounds, low)
    return bounds[first : bisect_right(bounds, high, lo=first)]


def longest(bounds: Bounds) -> tuple[int, int]:
    """The longest document: its number and its length in tokens; looked for a part at a time."""
    best, part = (0, 0), 2**20
    for low in range(0, len(bounds) - 1, part):
        sizes = np.diff(bounds[low : low + part + 1])
        at = int(sizes.argmax())
        best = max(best, (low + at, int(sizes[at])), key=lambda found: found[1])
    return best
