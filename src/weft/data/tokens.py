"""Token streams over files: bytes of text, the ids of .bin files, or ids that a tokenizer produced in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.document_bounds import Bounds
from weft.data.files import KEY, is_token_file, read_fault
from weft.errors import DataError, Fault, counted

Array = NDArray[Any]

MIN_ON_DISK_BYTES = 2**20
"""Files of this size and above stay on the disk, smaller ones are read into memory."""
SCANNED_TOKENS = 2**26
"""Tokens whose ids are checked before a run starts; later ones are checked when they are read."""
BLOCK_TOKENS = 2**20
"""Tokens that are checked or hashed at once."""
HASHED_BYTES = 2**28
"""Bytes at the start of a stream that its hash covers."""


VERIFIED_BYTES = 2**25
"""Tokens of a prepared folder of up to this size are verified whole at the start of a run."""


def verified_part(num_bytes: int) -> Literal["whole", "sampled"]:
    """How much of the tokens of a prepared folder the start of a run verifies."""
    return "whole" if num_bytes <= VERIFIED_BYTES else "sampled"


class Tokens(Protocol):
    """A sequence of token ids, in memory or on the disk."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, index: slice, /) -> Array: ...


@dataclass(frozen=True)
class TokenFile:
    """Tokens that stay on the disk; a slice is read on access.

    Not a memory map: mapped pages count as this process's memory and grow with what was read so
    far, and a file that is truncated while it is mapped kills the process. Recently read pages are
    in the system's cache either way.
    """

    path: Path
    dtype: np.dtype[Any]
    length: int
    skipped: int = 0
    """Bytes before the first token: a byte-order mark."""

    @property
    def nbytes(self) -> int:
        """Size of the tokens."""
        return self.length * self.dtype.itemsize

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: slice, /) -> Array:
        start, stop, _ = index.indices(self.length)
        offset = self.skipped + start * self.dtype.itemsize
        try:
            tokens = np.fromfile(self.path, self.dtype, stop - start, offset=offset)
        except OSError as error:
            got = f"{str(self.path)!r}: {error.strerror}"
            raise DataError(Fault(KEY, "cannot read the file any more", got=got)) from None
        if len(tokens) < stop - start:
            got = f"{start + len(tokens)} tokens in {self.path}"
            raise DataError(
                Fault(
                    KEY, "a file became shorter after it was opened", got=got, need=f"{self.length}"
                )
            )
        return tokens


@dataclass(frozen=True)
class TokenStream:
    """Concatenated files as one stream of tokens.

    Attributes:
        files: paths, for messages.
        parts: tokens of every file, or of all of them where they were tokenized in memory.
        vocab: ids are below this.
        documents: index of every document's first token, and the total length; None: a file is a
            document.
        known_sha256: of the tokens, as the metadata of a prepared folder states it.
        read_as: what the files were read as, in words; "" for a prepared folder.
    """

    files: tuple[Path, ...]
    parts: tuple[Tokens, ...]
    vocab: int
    documents: Bounds | None = None
    known_sha256: str | None = None
    read_as: str = ""

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Index of every file's first token, and the total length."""
        lengths = [len(part) for part in self.parts]
        return np.cumsum([0, *lengths], dtype=np.int64)

    @property
    def document_bounds(self) -> Bounds:
        """Index of every document's first token, and the total length."""
        if self.documents is None:
            return self.bounds
        return self.documents

    def __len__(self) -> int:
        return int(self.bounds[-1])

    def read_as_fact(self) -> dict[str, object]:
        """The fact of what the files were read as, where that is said."""
        return {"read_as": self.read_as} if self.read_as else {}

    @property
    def num_bytes(self) -> int:
        """Size of all tokens."""
        return sum(part.nbytes for part in self.parts)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens `start` to `stop` - 1.

        Raises:
            DataError: an id outside the vocabulary.
        """
        parts = [segment.tokens for segment in self._segments(start, stop)]
        tokens = np.concatenate(parts, dtype=np.int64)
        if int(tokens.max()) >= self.vocab:
            self.check(start, stop)
        return tokens

    def check(self, start: int, stop: int) -> None:
        """Check ids against the vocabulary, block by block.

        Raises:
            DataError: with the first id outside the vocabulary, its file and its index there.
        """
        for low in range(start, stop, BLOCK_TOKENS):
            high = min(low + BLOCK_TOKENS, stop)
            for segment in self._segments(low, high):
                if int(segment.tokens.max()) >= self.vocab:
                    raise DataError(self._vocabulary_fault(segment))

    def _vocabulary_fault(self, segment: _Segment) -> Fault:
        tokens = segment.tokens
        largest = int(tokens.max())
        first = int(np.argmax(tokens >= self.vocab))
        place = segment.offset + first
        return Fault(
            KEY,
            f"{segment.file} holds an id outside the vocabulary at token {place}",
            got=f"id {int(tokens[first])}",
            need=f"below model.vocab = {self.vocab}",
            fix=f"raise model.vocab above {largest}, or check data.token_dtype ({tokens.dtype})",
        )

    def _segments(self, start: int, stop: int) -> Iterator[_Segment]:
        """The parts of files between two indices of the stream; none is empty."""
        first_file = int(np.searchsorted(self.bounds, start, side="right")) - 1
        for number in range(first_file, len(self.parts)):
            file_start = int(self.bounds[number])
            if file_start >= stop:
                return
            part = self.parts[number]
            low = max(start - file_start, 0)
            high = min(stop - file_start, len(part))
            if low < high:
                yield _Segment(file=self.files[number], offset=low, tokens=part[low:high])

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the tokens' bytes, up to the first `HASHED_BYTES`."""
        if self.known_sha256 is not None:
            return self.known_sha256
        digest = hashlib.sha256()
        num_left = HASHED_BYTES
        for low in range(0, len(self), BLOCK_TOKENS):
            for segment in self._segments(low, low + BLOCK_TOKENS):
                data = segment.tokens.view(np.uint8)[:num_left]
                digest.update(data.data)
                num_left -= len(data)
            if not num_left:
                break
        return digest.hexdigest()


@dataclass(frozen=True)
class _Segment:
    """Consecutive tokens of one file, from index `offset` of the file."""

    file: Path
    offset: int
    tokens: Array


def open_stream(
    files: tuple[Path, ...], *, token_dtype: str, vocab: int, skipped: tuple[int, ...], read_as: str
) -> TokenStream:
    """Text files as bytes, or token files as ids; the first ids of token files are checked.

    Args:
        skipped: bytes at the start of each file that are no tokens.
        read_as: what the files are read as, in words.

    Raises:
        DataError: a file that cannot be read, is truncated or holds ids outside the vocabulary; or
            nothing in all of them.
    """
    holds_tokens = is_token_file(files[0])
    dtype = np.dtype(token_dtype if holds_tokens else np.uint8).newbyteorder("<")
    marks = zip(files, skipped, strict=True)
    parts = tuple(open_tokens(file, dtype, skipped=mark) for file, mark in marks)
    stream = TokenStream(files=files, parts=parts, vocab=vocab, read_as=read_as)
    if not len(stream):
        raise empty_error("0 bytes", files)
    if holds_tokens:  # bytes are below 256 anyway
        stream.check(0, min(len(stream), SCANNED_TOKENS))
    return stream


def empty_error(what: str, files: tuple[Path, ...]) -> DataError:
    """The error for files without tokens.

    Args:
        what: is in them, such as "0 bytes".
    """
    return DataError(
        Fault(
            KEY,
            "is empty",
            got=f"{what} in {file_names(files)}",
            need="some text or tokens",
            fix="name a file or folder with text",
        )
    )


def file_names(files: tuple[Path, ...]) -> str:
    """The first file, and how many more there are."""
    first = str(files[0])
    num_others = len(files) - 1
    if not num_others:
        return first
    return f"{first} and {num_others} more"


def open_tokens(file: Path, dtype: np.dtype[Any], *, skipped: int = 0) -> Tokens:
    """The ids of one file, but for the bytes that are skipped at its start.

    Raises:
        DataError: it cannot be read, or ends inside an id.
    """
    try:
        if not file.is_file():
            need = "a file, a folder or a glob"
            raise DataError(
                Fault(
                    KEY,
                    "is no regular file",
                    got=repr(str(file)),
                    need=need,
                    fix="copy its content into a file",
                )
            )
        size = file.stat().st_size - skipped
        if size % dtype.itemsize:
            need = f"a multiple of {dtype.itemsize} bytes for {dtype.name} (data.token_dtype)"
            fix = "write the file again, or set data.token_dtype"
            raise DataError(
                Fault(
                    KEY,
                    f"{file} ends inside a token",
                    got=counted(size, "byte"),
                    need=need,
                    fix=fix,
                )
            )
        if size < MIN_ON_DISK_BYTES:
            return np.frombuffer(file.read_bytes()[skipped:], dtype)
        with file.open("rb"):  # raises now if it may not be read
            return TokenFile(path=file, dtype=dtype, length=size // dtype.itemsize, skipped=skipped)
    except OSError as error:
        raise DataError(read_fault(file, error)) from None
