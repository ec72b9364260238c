"""Owns tokenizers: text to numbers and back, by bytes or by a tokenizer.json. No torch here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from weft.errors import DataError, Fault

KEY = "data.tokenizer"
BYTES = "bytes"
FILE = "tokenizer.json"
END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "<|eot_id|>"
)  # fmt: skip
"""What models call the token that ends a document; the first that a tokenizer knows is taken."""


class Tokenizer(Protocol):
    """Text to numbers and back.

    Attributes:
        name: `bytes`, or the path of its file.
        vocab: ids are below this.
        end: id of the token that ends a document; None where there is none.
        sha256: of what decides the numbers, in hex digits.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    @property
    def sha256(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text; nothing is put before or behind it."""

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of many texts, on as many threads as the tokenizer has."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; what is no text shows as a replacement character."""


class ByteTokenizer:
    """Every byte of UTF-8 is a token; there is no other."""

    name = BYTES
    vocab = 256
    end: int | None = None
    sha256 = hashlib.sha256(BYTES.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Bytes of the text; a byte that was no text (surrogateescape) is itself."""
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Bytes of the texts, as `bytes`."""
        return [text.encode("utf-8", "surrogateescape") for text in texts]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of bytes; an id that is no byte, which a model of a larger vocabulary may draw, is a question mark."""
        return bytes(token if token < self.vocab else ord("?") for token in tokens).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, as the library `tokenizers` reads it.

    Args:
        path: where it lies.
        inner: the library's `Tokenizer`.
        content: bytes of the file.
    """

    def __init__(self, path: Path, inner: Any, content: bytes) -> None:
        self.name, self._inner, self._content = str(path), inner, content

    @cached_property
    def vocab(self) -> int:
        """One above the highest id, added tokens included: ids may have holes."""
        return int(max(self._inner.get_vocab(with_added_tokens=True).values())) + 1

    @cached_property
    def end(self) -> int | None:
        """The first of `END_NAMES` that it knows."""
        found = (self._inner.token_to_id(name) for name in END_NAMES)
        return next((token for token in found if token is not None), None)

    @cached_property
    def sha256(self) -> str:
        """Of the file."""
        return hashlib.sha256(self._content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, no special ones added."""
        return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The tokens of many texts, on all cores."""
        return [found.ids for found in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, tokens: Iterable[int]) -> str:
        """Text, special tokens by name; ids that it does not know, which a padded model may draw, are left out."""
        return str(self._inner.decode(list(tokens), skip_special_tokens=False))


def open_tokenizer(name: str) -> Tokenizer:
    """The tokenizer of this name: `bytes`, a tokenizer.json, or a folder with one.

    Raises:
        DataError: no such file, no tokenizer in it, or the library is missing.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(name).expanduser()
    path = path / FILE if path.is_dir() else path
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise DataError(Fault(KEY, "cannot read the tokenizer", f"{name!r}: {why}", f"bytes or a {FILE}")) from None
    try:
        text = content.decode()
        json.loads(text)
        return FileTokenizer(path, library().Tokenizer.from_str(text), content)
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself, and only about the file
        why = str(error).partition("\n")[0][:160]
        need = f"bytes, or the {FILE} of the library tokenizers"
        raise DataError(Fault(KEY, f"{path} is no tokenizer", why, need)) from None


def library() -> Any:
    """The library `tokenizers`, an extra.

    Raises:
        DataError: it is not installed.
    """
    try:
        import tokenizers  # an extra, and 40 ms to import
    except ImportError:
        fix = "pip install 'weft-train[data]', or --data.tokenizer bytes"
        raise DataError(Fault(KEY, "needs the library tokenizers, which is not installed", fix=fix)) from None
    return tokenizers
