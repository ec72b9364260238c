"""Tokenizers: text to ids and back, by bytes or by a tokenizer.json; training of a byte-level BPE."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from weft.data.first_use import check_first_use
from weft.errors import DataError, Fault, first_line
from weft.small_files import MIB, UnreadableFile, parse_json, read_bytes

KEY = "data.tokenizer"
BYTES = "bytes"
FILE = "tokenizer.json"
END_NAMES = (
    "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "</s>", "<eos>", "<|im_end|>", "[EOS]", "<|eot_id|>"
)  # fmt: skip
"""Names of the token that ends a document; the first that a tokenizer has is used."""
NUM_BYTES = 256
MAX_ERROR_CHARS = 160
MAX_BYTES = 128 * MIB
"""Size of the largest tokenizer.json that is read."""
MAX_ID = 2**31
"""Ids of tokens are below this."""
SENTENCEPIECE_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
TRIAL = "weft.data.tokenizer:try_tokenizer"
SAMPLE = "".join(
    f"{char}{char * 60}\n {char}{other} " for char, other in pairwise(map(chr, range(32, 127)))
)
"""What a tokenizer of unknown origin encodes first: every character alone, and many times."""
PANIC = "PanicException"
"""Raised where Rust code of a library ends; no subclass of Exception."""
FIX = f"name a {FILE} that exists, or bytes"


class EncodedText(Protocol):
    """The ids of a text, and the characters [start, stop) that each is of."""

    @property
    def ids(self) -> Sequence[int]: ...
    @property
    def offsets(self) -> Sequence[tuple[int, int]]: ...


class Tokenizer(Protocol):
    """Text to ids and back.

    Attributes:
        name: `bytes`, or the path of its file.
        vocab: ids are below this.
        end: id of the token that ends a document; None where there is none.
        end_text: its text; "" where there is none.
        sha256: of what determines the ids, in hex digits.
    """

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def end(self) -> int | None: ...
    @property
    def end_text(self) -> str: ...
    @property
    def sha256(self) -> str: ...

    def encode(self, text: str) -> list[int]:
        """The ids of a text; no special tokens are added."""

    def encode_chars(self, text: str, *, adds_special: bool) -> EncodedText:
        """The ids of a text with the characters of each.

        Args:
            adds_special: whether the tokenizer's own special tokens are added.
        """

    def num_bytes(self) -> NDArray[np.int64]:
        """num_bytes_V: length in bytes of the text of each id; 0 for special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of many texts, on as many threads as the tokenizer has."""

    def decode_batch(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The texts of many lists of ids, on as many threads."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids; invalid UTF-8 becomes the replacement character."""


@dataclass(frozen=True)
class EncodedBytes:
    """The bytes of a text."""

    text: str
    ids: list[int]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """The character that each byte is of."""
        found = []
        for index, char in enumerate(self.text):
            encoded = char.encode("utf-8", "surrogateescape")
            offset = (index, index + 1)
            found.extend([offset] * len(encoded))
        return found


class ByteTokenizer:
    """Every byte of UTF-8 is a token; there are no others."""

    name = BYTES
    vocab = 256
    end: int | None = None
    end_text = ""
    sha256 = hashlib.sha256(BYTES.encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Bytes of the text; a byte that was not UTF-8 (surrogateescape) is itself."""
        return list(text.encode("utf-8", "surrogateescape"))

    def encode_chars(self, text: str, *, adds_special: bool) -> EncodedText:
        """Bytes of the text; there are no special tokens."""
        return EncodedBytes(text, self.encode(text))

    def num_bytes(self) -> NDArray[np.int64]:
        """num_bytes_V: one each."""
        return np.ones(self.vocab, dtype=np.int64)

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Bytes of the texts, as `bytes`."""
        return [text.encode("utf-8", "surrogateescape") for text in texts]

    def decode_batch(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Texts of many lists of bytes."""
        return list(map(self.decode, tokens))

    def decode(self, tokens: Iterable[int]) -> str:
        """Text of bytes; an id that is no byte, which a model with a larger vocabulary may produce,
        is a question mark.
        """
        known = [token if token < self.vocab else ord("?") for token in tokens]
        return bytes(known).decode(errors="replace")


class FileTokenizer:
    """A tokenizer.json, read by the library `tokenizers`.

    Args:
        path: of the file.
        inner: the library's `Tokenizer`.
        content: bytes of the file.
    """

    def __init__(self, path: Path, inner: Any, content: bytes) -> None:
        self.name = str(path)
        self._inner = inner
        self._content = content

    @cached_property
    def vocab(self) -> int:
        """One above the highest id, added tokens included: ids may have gaps."""
        ids = self._inner.get_vocab(with_added_tokens=True).values()
        return int(max(ids, default=-1)) + 1

    @property
    def base_vocab(self) -> int:
        """One above the highest id without added tokens."""
        ids = self._inner.get_vocab(with_added_tokens=False).values()
        return int(max(ids, default=-1)) + 1

    @cached_property
    def end(self) -> int | None:
        """The first of `END_NAMES` that it has."""
        for name in END_NAMES:
            token: int | None = self._inner.token_to_id(name)
            if token is not None:
                return token
        return None

    @property
    def end_text(self) -> str:
        """Text of the token that ends a document."""
        if self.end is None:
            return ""
        return str(self._inner.id_to_token(self.end))

    @cached_property
    def sha256(self) -> str:
        """The hash of the tokenizer's file."""
        return hashlib.sha256(self._content).hexdigest()

    def encode(self, text: str) -> list[int]:
        """The ids of a text, no special tokens added."""
        with self._without_panics():
            return list(self._inner.encode(text, add_special_tokens=False).ids)

    def encode_chars(self, text: str, *, adds_special: bool) -> EncodedText:
        """The ids of a text with the characters of each."""
        with self._without_panics():
            encoded: EncodedText = self._inner.encode(text, add_special_tokens=adds_special)
            return encoded

    def num_bytes(self) -> NDArray[np.int64]:
        """num_bytes_V: of each id's text: a letter of a byte-level token is a byte, `<0x0A>` is one,
        and `▁` is a space.
        """
        lengths = np.zeros(self.vocab, dtype=np.int64)
        settings = json.loads(self._content)
        added = settings.get("added_tokens") or ()
        special = {token["id"] for token in added if token["special"]}
        is_byte_level = "ByteLevel" in json.dumps(settings.get("decoder"))
        for token, number in self._inner.get_vocab(with_added_tokens=True).items():
            if number in special:
                continue
            is_byte = _BYTE_TOKEN.fullmatch(token) is not None
            text = token.replace(SENTENCEPIECE_SPACE, " ")
            if is_byte_level:
                length = len(token)
            else:
                length = len(text.encode("utf-8", "replace"))
            lengths[number] = 1 if is_byte else length
        return lengths

    def encode_batch(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """The ids of many texts, on all cores."""
        with self._without_panics():
            encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode_batch(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """The texts of many lists of ids, on all cores."""
        with self._without_panics():
            texts: list[str] = self._inner.decode_batch(
                list(map(list, tokens)), skip_special_tokens=False
            )
        return texts

    def decode(self, tokens: Iterable[int]) -> str:
        """Text, special tokens by name; unknown ids, which a model with a padded vocabulary may
        produce, are left out.
        """
        with self._without_panics():
            return str(self._inner.decode(list(tokens), skip_special_tokens=False))

    @contextmanager
    def _without_panics(self) -> Iterator[None]:
        """An end of the library's code, such as of an endless pattern, as an error of the file."""
        try:
            yield
        except BaseException as error:
            if type(error).__name__ != PANIC:
                raise
            raise DataError(_unusable(Path(self.name), error)) from None


def _unusable(path: Path, error: BaseException) -> Fault:
    why = first_line(error)[:MAX_ERROR_CHARS]
    return Fault(KEY, f"{path} does not encode a text", got=why, fix=FIX)


def try_tokenizer(path: str) -> None:
    """Encode a text, in a process that may be ended.

    Raises:
        DataError: the library ends at it.
    """
    import tokenizers

    try:
        inner = tokenizers.Tokenizer.from_file(path)
    except Exception:  # noqa: BLE001 - whatever it is, no tokenizer: the caller says so
        return
    FileTokenizer(Path(path), inner, b"").encode_batch((SAMPLE, SAMPLE[::-1]))


def open_tokenizer(name: str, *, within: Path | None = None) -> Tokenizer:
    """The tokenizer of this name: `bytes`, a tokenizer.json, or a folder with one.

    Args:
        within: the folder that a tokenizer.json must lie in, where a folder names it, not the user.

    Raises:
        DataError: no such file, or no tokenizer in it.
    """
    if name == BYTES:
        return ByteTokenizer()
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        path = path / FILE
    else:
        path = path
    try:
        content = read_bytes(path, max_bytes=MAX_BYTES, within=within)
    except UnreadableFile as error:
        if error.got:
            why = f"{error.what}: {error.got}"
        else:
            why = error.what
        raise DataError(
            Fault(
                KEY,
                "cannot read the tokenizer",
                got=f"{name!r}: {why}",
                need=f"bytes or a {FILE}",
                fix=FIX,
            )
        ) from None
    check_first_use(TRIAL, {"path": str(path)}, content=content, key=KEY, name=str(path))
    import tokenizers  # 40 ms to import

    try:
        text = content.decode()
        parse_json(text)
        inner = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself, and only about the file
        why = first_line(error)[:MAX_ERROR_CHARS]
        need = f"bytes, or the {FILE} of the library tokenizers"
        raise DataError(
            Fault(KEY, f"{path} is not a tokenizer", got=why, need=need, fix=FIX)
        ) from None
    # stored settings of an earlier use: texts would lose their ends, or get tokens of padding
    inner.no_truncation()
    inner.no_padding()
    return FileTokenizer(path, inner, content)


def train_bpe(texts: Iterable[str], *, vocab: int) -> str:
    """Train a byte-level BPE (Sennrich et al. 2016) of `vocab` ids: the end of a document, all
    bytes, then merges.

    Returns:
        The text of a tokenizer.json.

    Raises:
        DataError: `vocab` has no room for merges, or there is too little text for so many.
    """
    end = END_NAMES[0]
    min_vocab = NUM_BYTES + 2
    if vocab < min_vocab:
        need = f"above {NUM_BYTES + 1}: every byte and {end}"
        raise DataError(
            Fault(
                "vocab",
                "leaves no room for pairs of bytes",
                got=str(vocab),
                need=need,
                fix="--vocab 8192",
            )
        )
    import tokenizers  # 40 ms to import
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[end],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    num_found = tokenizer.get_vocab_size()
    if num_found < vocab:
        got = f"{num_found} different tokens in all of it"
        fix = f"--vocab {num_found}, or more text"
        raise DataError(
            Fault(
                KEY,
                "there is too little text for so many tokens",
                got=got,
                need=f"{vocab}",
                fix=fix,
            )
        )
    return str(tokenizer.to_str())
