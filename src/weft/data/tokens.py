"""Owns a stream of tokens over files: bytes of text, the numbers of .bin files, or what a tokenizer made in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.bounds import Bounds
from weft.data.files import KEY, TOKEN_SUFFIX
from weft.errors import DataError, Fault

Array = NDArray[Any]

LEFT_ON_DISK_FROM_BYTES = 2**20
"""Files of this size and above stay on the disk, smaller ones are read: opens are few, memory is small."""
SCANNED_TOKENS = 2**26
"""Tokens whose ids are looked at before a run starts; later ones are looked at when they are read."""
BLOCK_TOKENS = 2**20
"""Tokens that are looked at or hashed at once."""
HASHED_BYTES = 2**28


class Tokens(Protocol):
    """Numbers in a row, in memory or on the disk."""

    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    def __len__(self) -> int: ...
    def __getitem__(self, places: slice, /) -> Array: ...


@dataclass(frozen=True)
class TokenFile:
    """Tokens that stay on the disk; a slice is read when it is asked for.

    Not a memory map: pages of a map count as this process's memory and grow with what was read so far, and a file that
    is cut off under a map kills the process. What was read lately is in the system's cache either way.
    """

    path: Path
    dtype: np.dtype[Any]
    length: int

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self.length * self.dtype.itemsize

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, places: slice, /) -> Array:
        start, stop, _ = places.indices(self.length)
        try:
            found = np.fromfile(self.path, self.dtype, stop - start, offset=start * self.dtype.itemsize)
        except OSError as error:
            what = "cannot read the file any more"
            raise DataError(Fault(KEY, what, f"{str(self.path)!r}: {error.strerror}")) from None
        if len(found) < stop - start:
            got = f"{start + len(found)} tokens in {self.path}"
            raise DataError(Fault(KEY, "a file became shorter after it was opened", got, f"{self.length}"))
        return found


@dataclass(frozen=True)
class TokenStream:
    """Files end to end as one stream of tokens.

    Attributes:
        files: where the pieces come from.
        pieces: tokens of every file.
        vocab: ids are below this.
        documents: place of every document's first token, and the length of the whole; None: a file is a document.
        known_sha256: of the tokens, where it is known already.
    """

    files: tuple[Path, ...]
    pieces: tuple[Tokens, ...]
    vocab: int
    documents: Bounds | None = None
    known_sha256: str | None = None

    @cached_property
    def bounds(self) -> NDArray[np.int64]:
        """Place of every file's first token, and the length of the whole."""
        return np.cumsum([0, *(len(piece) for piece in self.pieces)], dtype=np.int64)

    @property
    def document_bounds(self) -> Bounds:
        """Place of every document's first token, and the length of the whole."""
        return self.bounds if self.documents is None else self.documents

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @property
    def num_bytes(self) -> int:
        """Size of all tokens."""
        return sum(piece.nbytes for piece in self.pieces)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """Tokens from place `start` up to `stop`.

        Raises:
            DataError: an id beyond the vocabulary.
        """
        tokens = np.concatenate([piece.astype(np.int64) for _, _, piece in self._parts(start, stop)])
        if int(tokens.max()) >= self.vocab:
            self.check(start, stop)
        return tokens

    def check(self, start: int, stop: int) -> None:
        """Look at ids only, block by block.

        Raises:
            DataError: naming the first id beyond the vocabulary, its file and its place there.
        """
        for low in range(start, stop, BLOCK_TOKENS):
            for file, offset, piece in self._parts(low, min(low + BLOCK_TOKENS, stop)):
                if int(piece.max()) >= self.vocab:
                    at = int(np.argmax(piece >= self.vocab))
                    what = f"{file} holds a token beyond the vocabulary at token {offset + at}"
                    fix = f"raise model.vocab above {int(piece.max())}, or check data.token_dtype ({piece.dtype})"
                    raise DataError(Fault(KEY, what, f"id {int(piece[at])}", f"below model.vocab = {self.vocab}", fix))

    def _parts(self, start: int, stop: int) -> Iterator[tuple[Path, int, Array]]:
        """Pieces of the files between two places: file, place in the file, tokens; none is empty."""
        for number in range(int(np.searchsorted(self.bounds, start, side="right")) - 1, len(self.pieces)):
            first = int(self.bounds[number])
            if first >= stop:
                return
            lo, hi = max(start - first, 0), min(stop - first, len(self.pieces[number]))
            if lo < hi:
                yield self.files[number], lo, self.pieces[number][lo:hi]

    @cached_property
    def sha256(self) -> str:
        """SHA-256 of the tokens' bytes, up to the first 256 MB."""
        if self.known_sha256 is not None:
            return self.known_sha256
        digest, left = hashlib.sha256(), HASHED_BYTES
        for low in range(0, len(self), BLOCK_TOKENS):
            for _, _, piece in self._parts(low, low + BLOCK_TOKENS):
                block = piece.view(np.uint8)[:left]
                digest.update(block.data)
                left -= len(block)
            if not left:
                break
        return digest.hexdigest()


def open_stream(files: tuple[Path, ...], *, token_dtype: str, vocab: int) -> TokenStream:
    """Text files as bytes, or token files as numbers, with the ids at the beginning looked at.

    Raises:
        DataError: a file that cannot be read, is cut off or holds ids beyond the vocabulary; or nothing in all of them.
    """
    dtype = np.dtype(token_dtype if files[0].suffix == TOKEN_SUFFIX else np.uint8).newbyteorder("<")
    stream = TokenStream(files, tuple(open_tokens(file, dtype) for file in files), vocab)
    if not len(stream):
        raise DataError(Fault(KEY, "is empty", f"0 bytes in {names(files)}", "some text or tokens"))
    if files[0].suffix == TOKEN_SUFFIX:  # of bytes it is known what they are
        stream.check(0, min(len(stream), SCANNED_TOKENS))
    return stream


def names(files: tuple[Path, ...]) -> str:
    """A few files in words."""
    return f"{files[0]} and {len(files) - 1} more" if len(files) > 1 else str(files[0])


def open_tokens(file: Path, dtype: np.dtype[Any]) -> Tokens:
    """The numbers of one file.

    Raises:
        DataError: it cannot be read, or ends inside a number.
    """
    try:
        if not file.is_file():
            raise DataError(Fault(KEY, "is no regular file", repr(str(file)), "a file, a folder or a glob"))
        size = file.stat().st_size
        if size % dtype.itemsize:
            need = f"a multiple of {dtype.itemsize} bytes for {dtype.name} (data.token_dtype)"
            fix = "write the file again, or set data.token_dtype"
            raise DataError(Fault(KEY, f"{file} ends inside a token", f"{size} bytes", need, fix))
        if size < LEFT_ON_DISK_FROM_BYTES:
            return np.frombuffer(file.read_bytes(), dtype)
        with file.open("rb"):  # says at once that it may not be read
            return TokenFile(file, dtype, size // dtype.itemsize)
    except OSError as error:
        raise DataError(
            Fault(KEY, "cannot read the file", repr(str(file)), fix=f"{error.strerror}: check it")
        ) from None
