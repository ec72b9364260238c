"""One data file of a checkpoint: safetensors layout, block checksums, memory-mapped and verified reading. Pure: no torch.

    | length of the JSON header, 8 bytes | JSON, padded with spaces to a multiple of 64 | piece | piece | ... |

Pieces with wide dtypes come first, so each starts at a multiple of its item size and can be mapped
in place.
"""

from __future__ import annotations

import json
import mmap
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.format import DTYPES, DataFile, Piece, Stored, StoredDtype
from weft.checkpoint.manifest import FIX_USE_ANOTHER, read_manifest
from weft.core.axes import Box
from weft.errors import CheckpointError, Fault, counted
from weft.small_files import UnreadableFile, open_regular

MAX_CHECKED_BYTES = 2**28
"""Bytes that `check_stored_bytes` reads."""
ALIGNMENT = 64
BLOCK_BYTES = 16 * 2**20
"""Bytes per checksum: reading a few rows verifies the blocks that hold those rows, not the whole
piece.
"""


@dataclass(frozen=True)
class FileEntry:
    """One piece of a tensor before it has an offset in the file."""

    name: str
    box: Box
    dtype: StoredDtype

    @property
    def num_bytes(self) -> int:
        """Length in the file, bytes."""
        _, item_bytes = DTYPES[self.dtype]
        return self.box.size * item_bytes

    @property
    def title(self) -> str:
        """Name in the safetensors header: `model/head.weight[0:8,16:32]`."""
        ranges = [f"{lo}:{hi}" for lo, hi in zip(self.box.lo, self.box.hi, strict=True)]
        return f"{self.name}[{','.join(ranges)}]"


@dataclass(frozen=True)
class FileLayout:
    """Byte layout of one file; `offsets` holds the first byte of every entry, in the given order."""

    header: bytes
    offsets: tuple[int, ...]
    num_bytes: int


def write_order(entry: FileEntry) -> tuple[int, str, tuple[int, ...]]:
    """Sort key that keeps every piece aligned and makes files deterministic."""
    _, item_bytes = DTYPES[entry.dtype]
    return -item_bytes, entry.name, entry.box.lo


def lay_out(entries: Sequence[FileEntry]) -> FileLayout:
    """The layout of a file that holds `entries` in this order."""
    header_entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts = []
    end = 0
    for entry in entries:
        start = end
        end = end + entry.num_bytes
        starts.append(start)
        safetensors_dtype, _ = DTYPES[entry.dtype]
        header_entries[entry.title] = {
            "dtype": safetensors_dtype,
            "shape": list(entry.box.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header_entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    offsets = tuple(len(header) + start for start in starts)
    return FileLayout(header=header, offsets=offsets, num_bytes=len(header) + end)


def block_crcs(data: memoryview, *, block_bytes: int) -> Iterator[tuple[memoryview, int]]:
    """The blocks of a piece, each with its CRC-32."""
    for start in range(0, len(data), block_bytes):
        stop = start + block_bytes
        block = data[start:stop]
        crc = zlib.crc32(block)
        yield block, crc


class MappedFile:
    """A memory-mapped data file; each block is verified against its checksum before its first use.

    The mapping is private (copy on write): changes in memory never reach the disk.

    Raises:
        CheckpointError: the file is missing, has another length, or its header is damaged.
    """

    def __init__(self, path: Path, facts: DataFile, *, block_bytes: int) -> None:
        self.path = path
        self._block_bytes = block_bytes
        self._verified: set[tuple[int, int]] = set()
        try:
            with open_regular(path, within=path.parent) as file:
                self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError, UnreadableFile) as error:
            raise CheckpointError(
                Fault(str(path), f"cannot be read: {error}", fix=FIX_USE_ANOTHER)
            ) from None
        if len(self._bytes) != facts.num_bytes:
            got = counted(len(self._bytes), "byte")
            need = f"{facts.num_bytes}"
            what = "its length differs from the length that was written"
            raise CheckpointError(Fault(str(path), what, got=got, need=need, fix=FIX_USE_ANOTHER))
        header_crc = zlib.crc32(self._bytes[: facts.header_bytes])
        if header_crc != facts.header_crc32:
            raise CheckpointError(_damage_fault(path, "the header", header_crc, facts.header_crc32))

    def read(self, name: str, stored: Stored, piece: Piece, *, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of a piece, after verifying the blocks that contain them.

        Raises:
            CheckpointError: a block is damaged.
        """
        first_block = start // self._block_bytes
        end_block = -(-stop // self._block_bytes)
        for block in range(first_block, end_block):
            self.verify_block(name, stored, piece, block=block)
        return self._bytes[piece.at + start : piece.at + stop]

    def verify_block(self, name: str, stored: Stored, piece: Piece, *, block: int) -> None:
        """Compare one block of a piece with its checksum, once.

        Raises:
            CheckpointError: the block is damaged.
        """
        key = (piece.at, block)
        if key in self._verified:
            return
        start = block * self._block_bytes
        stop = min(start + self._block_bytes, stored.num_bytes(piece))
        content = self._bytes[piece.at + start : piece.at + stop]
        crc = zlib.crc32(content)
        if crc != piece.crc32[block]:
            raise CheckpointError(
                _damage_fault(self.path, f"tensor {name!r}", crc, piece.crc32[block])
            )
        self._verified.add(key)


def check_stored_bytes(path: Path, *, section: str = "model") -> None:
    """Verify the tensors of one section of the checkpoint at `path`, up to `MAX_CHECKED_BYTES`;
    later reads verify all of them. No torch.

    Raises:
        CheckpointError: a block is damaged.
    """
    manifest = read_manifest(path)
    num_left = MAX_CHECKED_BYTES
    files: dict[str, MappedFile] = {}
    for name, stored in manifest.tensors.items():
        if not name.startswith(f"{section}/"):
            continue
        for piece in stored.pieces:
            num_bytes = stored.num_bytes(piece)
            if num_left <= 0:
                return
            num_left -= num_bytes
            if piece.file not in files:
                facts = manifest.files[piece.file]
                files[piece.file] = MappedFile(
                    path / piece.file, facts, block_bytes=manifest.block_bytes
                )
            files[piece.file].read(name, stored, piece, start=0, stop=num_bytes)


def _damage_fault(path: Path, what: str, crc: int, need: int) -> Fault:
    return Fault(
        str(path),
        f"{what} is damaged on the disk",
        got=f"checksum {crc:08x}",
        need=f"{need:08x}",
        fix=FIX_USE_ANOTHER,
    )
