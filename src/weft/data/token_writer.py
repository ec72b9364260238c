"""Writer of one split of a prepared folder: tokens and document bounds are appended, hashed while written, and synced."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from weft.data.document_bounds import BOUND
from weft.data.prepared import SplitInfo

BUFFER_BYTES = 2**20


class TokenWriter:
    """Writes `NAME.bin` and `NAME.idx`, and `NAME.mask` of records.

    Args:
        stem: path without a suffix.
        dtype: of the tokens.
        has_mask: whether a mask of answers is written.
    """

    def __init__(self, stem: Path, dtype: np.dtype[Any], *, has_mask: bool = False) -> None:
        self.dtype = dtype.newbyteorder("<")
        self.num_tokens = 0
        self.num_documents = 0
        self.longest = 0
        self._document_start = 0
        self._bin = _HashedFile(stem.with_suffix(".bin"))
        self._idx = _HashedFile(stem.with_suffix(".idx"))
        self._mask = _HashedFile(stem.with_suffix(".mask")) if has_mask else None
        self._write_bound(0)

    def add_masked(self, tokens: Sequence[int], mask: NDArray[np.uint8]) -> None:
        """Append a whole document with its mask."""
        assert self._mask is not None, "the writer of records has a mask"
        self.add(tokens)
        self._mask.write(mask.tobytes())
        self.end_document()

    def add(self, tokens: Sequence[int]) -> None:
        """Append tokens to the current document; `bytes` are byte tokens."""
        if not tokens:
            return
        if isinstance(tokens, bytes):
            array = np.frombuffer(tokens, np.uint8)
        else:
            array = np.array(tokens)
        # of a fixed byte order, so that the folder and its hash are the same on every machine
        self._bin.write(array.astype(self.dtype).tobytes())
        self.num_tokens += len(array)

    def end_document(self) -> None:
        """Finish the current document; one without tokens does not count."""
        length = self.num_tokens - self._document_start
        if length == 0:
            return
        self.num_documents += 1
        self.longest = max(self.longest, length)
        self._document_start = self.num_tokens
        self._write_bound(self.num_tokens)

    def info(self) -> SplitInfo:
        """Sizes and hashes of what was written."""
        return SplitInfo(
            documents=self.num_documents,
            tokens=self.num_tokens,
            longest=self.longest,
            sha256=self._bin.digest.hexdigest(),
            bounds_sha256=self._idx.digest.hexdigest(),
            mask_sha256=self._mask.digest.hexdigest() if self._mask else "",
        )

    def _write_bound(self, index: int) -> None:
        self._idx.write(np.array(index, BOUND).tobytes())

    def __enter__(self) -> TokenWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self._bin.close()
        self._idx.close()
        if self._mask:
            self._mask.close()


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, path: Path) -> None:
        self.digest = hashlib.sha256()
        self._file: IO[bytes] = path.open("wb", buffering=BUFFER_BYTES)

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.digest.update(data)

    def close(self) -> None:
        """Flush, sync to the disk and close."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
