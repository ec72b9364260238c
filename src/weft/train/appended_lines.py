"""Lines that were appended to a file of events since the last look: no byte is read twice while the file only grows."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from weft.small_files import UnreadableFile, capped_lines, open_regular
from weft.train.event_lines import MAX_LINE_BYTES


@dataclass(frozen=True)
class FileStamp:
    """Which file it is, and how much it holds: all zero where there is none."""

    device: int = 0
    inode: int = 0
    size: int = 0

    @staticmethod
    def of(path: Path) -> FileStamp:
        """The stamp of a file."""
        try:
            found = os.stat(path)
        except OSError:
            return FileStamp()
        return FileStamp(found.st_dev, found.st_ino, found.st_size)


class AppendedLines:
    """A position in a file to which lines are appended.

    Args:
        tail_bytes: the first look begins so far before the end; None: at the start.
    """

    def __init__(self, path: Path, *, tail_bytes: int | None = None) -> None:
        self._path = path
        self._tail_bytes = tail_bytes
        self._file = FileStamp()
        self._offset = 0

    def was_replaced(self) -> bool:
        """Whether there is another file now, or a shorter one: what was read of it does not count, and
        the next look begins as the first did.
        """
        now = FileStamp.of(self._path)
        is_same = (now.device, now.inode) == (self._file.device, self._file.inode)
        if is_same and now.size >= self._offset:
            return False
        self._file = now
        self._offset = 0 if self._tail_bytes is None else max(0, now.size - self._tail_bytes)
        return True

    def read(self) -> Iterator[bytes]:
        """The complete lines that are new, without an incomplete last one.

        Raises:
            ValueError: a line is too long.
            UnreadableFile: there is no such file (any more), or it cannot be read.
        """
        with open_regular(self._path, within=self._path.parent) as file:
            file.seek(self._offset)
            for line in self._capped_lines(file):
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                yield line

    def read_all(self) -> Iterator[bytes]:
        """As `read`; what is too long or cannot be read ends it."""
        try:
            yield from self.read()
        except (UnreadableFile, ValueError):
            return

    def _capped_lines(self, file: IO[bytes]) -> Iterator[bytes]:
        try:
            yield from capped_lines(file, max_bytes=MAX_LINE_BYTES)
        except ValueError:
            self._offset = max(self._offset, file.seek(0, os.SEEK_END))
            raise
