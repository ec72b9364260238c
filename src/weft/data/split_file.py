"""Owns writing one split of a prepared folder: tokens and bounds appended, hashed on the way, on the disk at the end."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from weft.data.bounds import BOUND
from weft.data.prepared import Part

BUFFER_BYTES = 2**20


class SplitFile:
    """`NAME.bin` and `NAME.idx` under way.

    Args:
        stem: path without a suffix.
        dtype: of the tokens.
    """

    def __init__(self, stem: Path, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype.newbyteorder("<")
        self.tokens = self.documents = self.longest = 0
        self._begin = 0
        self._bin = _Hashed(stem.with_suffix(".bin"))
        self._idx = _Hashed(stem.with_suffix(".idx"))
        self._bound(0)

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the document at hand; `bytes` are byte tokens."""
        if tokens:
            found = np.frombuffer(tokens, np.uint8) if isinstance(tokens, bytes) else np.array(tokens)
            self._bin.write(found.astype(self.dtype).tobytes())
            self.tokens += len(found)

    def end_document(self) -> None:
        """The document at hand is over; without tokens it was none."""
        if (length := self.tokens - self._begin) == 0:
            return
        self.documents, self.longest = self.documents + 1, max(self.longest, length)
        self._begin = self.tokens
        self._bound(self.tokens)

    def part(self) -> Part:
        """What was written."""
        return Part(
            documents=self.documents,
            tokens=self.tokens,
            longest=self.longest,
            sha256=self._bin.digest.hexdigest(),
            bounds_sha256=self._idx.digest.hexdigest(),
        )

    def _bound(self, place: int) -> None:
        self._idx.write(np.array(place, BOUND).tobytes())

    def __enter__(self) -> SplitFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._bin.close()
        self._idx.close()


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, path: Path) -> None:
        self.digest = hashlib.sha256()
        self._file: IO[bytes] = path.open("wb", buffering=BUFFER_BYTES)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)

    def close(self) -> None:
        """Everything is on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
