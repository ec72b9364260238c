"""Owns the inside of one data file: safetensors' layout, the header first, then the pieces without a gap. Pure: no torch.

    | length of the JSON, 8 bytes | JSON, spaces up to a multiple of 64 | piece | piece | ... |

Pieces of wide types come first, so that each starts at a multiple of its entries' size and can be mapped as it lies.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.checkpoint.format import DTYPES, StoredDtype
from weft.core.axes import Box

ALIGNMENT = 64
BLOCK_BYTES = 16 * 2**20
"""A piece has a checksum for every so many bytes: a reader of a few rows checks those rows, not the whole piece."""


@dataclass(frozen=True)
class Slot:
    """A piece before it has a place."""

    name: str
    box: Box
    dtype: StoredDtype

    @property
    def num_bytes(self) -> int:
        """Length in the file."""
        return self.box.size * DTYPES[self.dtype][1]

    @property
    def title(self) -> str:
        """Its name within the file: `model/head.weight[0:8,16:32]`."""
        return f"{self.name}[{','.join(f'{lo}:{hi}' for lo, hi in zip(self.box.lo, self.box.hi, strict=True))}]"


@dataclass(frozen=True)
class Layout:
    """Where everything lies in one file. `at` has the first byte of every slot, in the order given."""

    header: bytes
    at: tuple[int, ...]
    num_bytes: int


def write_order(slot: Slot) -> tuple[int, str, tuple[int, ...]]:
    """Sorting by this keeps every piece aligned, and files free of chance."""
    return -DTYPES[slot.dtype][1], slot.name, slot.box.lo


def lay_out(slots: Sequence[Slot]) -> Layout:
    """The file that holds `slots` in this order."""
    offsets = list(_running(slots))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for slot, (start, stop) in zip(slots, offsets, strict=True):
        entries[slot.title] = {
            "dtype": DTYPES[slot.dtype][0],
            "shape": list(slot.box.shape),
            "data_offsets": [start, stop],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    end = offsets[-1][1] if offsets else 0
    return Layout(header, tuple(len(header) + start for start, _ in offsets), len(header) + end)


def block_crcs(data: memoryview, *, block_bytes: int) -> Iterator[tuple[memoryview, int]]:
    """The blocks of a piece, each with its checksum."""
    for start in range(0, len(data), block_bytes):
        block = data[start : start + block_bytes]
        yield block, zlib.crc32(block)


def _running(slots: Sequence[Slot]) -> Iterator[tuple[int, int]]:
    start = 0
    for slot in slots:
        yield start, start + slot.num_bytes
        start += slot.num_bytes
