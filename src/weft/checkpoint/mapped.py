"""Owns one data file of an opened checkpoint: mapped, and no byte of it used before its checksum was right. Pure: no torch."""

from __future__ import annotations

import mmap
import zlib
from pathlib import Path

from weft.checkpoint.format import DataFile, Piece, Stored
from weft.checkpoint.manifest import OTHER
from weft.errors import CheckpointError, Fault


class MappedFile:
    """Bytes of one file. The mapping is private: nothing that happens to them in memory reaches the disk.

    Raises:
        CheckpointError: the file is missing, has another length, or its header is damaged.
    """

    def __init__(self, path: Path, facts: DataFile, *, block_bytes: int) -> None:
        self.path, self._block_bytes = path, block_bytes
        self._right = set[tuple[int, int]]()
        try:
            with path.open("rb") as file:
                self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        except (OSError, ValueError) as error:
            raise CheckpointError(Fault(str(path), f"cannot be read: {error}", fix=OTHER)) from None
        if len(self._bytes) != facts.num_bytes:
            got, need = f"{len(self._bytes)} bytes", f"{facts.num_bytes}"
            raise CheckpointError(Fault(str(path), "another length than it was written with", got, need, OTHER))
        if (crc := zlib.crc32(self._bytes[: facts.header_bytes])) != facts.header_crc32:
            raise CheckpointError(_damaged(path, "the header", crc, facts.header_crc32))

    def piece(self, name: str, stored: Stored, piece: Piece, *, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of a piece, once they are known to be those that were written.

        Raises:
            CheckpointError: they are not.
        """
        for block in range(start // self._block_bytes, -(-stop // self._block_bytes)):
            self.check(name, stored, piece, block=block)
        return self._bytes[piece.at + start : piece.at + stop]

    def check(self, name: str, stored: Stored, piece: Piece, *, block: int) -> None:
        """Compare one block of a piece with its checksum, if that has not been done.

        Raises:
            CheckpointError: it is damaged.
        """
        if (piece.at, block) in self._right:
            return
        first = block * self._block_bytes
        last = min(first + self._block_bytes, stored.num_bytes(piece))
        if (crc := zlib.crc32(self._bytes[piece.at + first : piece.at + last])) != piece.crc32[block]:
            raise CheckpointError(_damaged(self.path, f"tensor {name!r}", crc, piece.crc32[block]))
        self._right.add((piece.at, block))


def _damaged(path: Path, what: str, crc: int, need: int) -> Fault:
    return Fault(str(path), f"{what} is damaged on the disk", f"checksum {crc:08x}", f"{need:08x}", OTHER)
