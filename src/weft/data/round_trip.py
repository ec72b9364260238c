"""Check that a tokenizer reproduces texts: decode(encode(text)) == text; counts those that differ and describes the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.data.tokenizer import BYTES, KEY, Tokenizer
from weft.errors import DataError, Fault, counted

SHOWN_CHARS = 20
ACCEPT = "--data.round_trip any"


@dataclass
class RoundTrip:
    """Counts the texts that a tokenizer does not reproduce.

    Attributes:
        num_different: texts that it changes.
        first: number of the first such document, and what becomes of it; "" where there is none.
    """

    tokenizer: Tokenizer
    num_different: int = 0
    first: str = ""
    _is_exact: bool = field(init=False)

    def __post_init__(self) -> None:
        self._is_exact = self.tokenizer.name == BYTES

    def check(
        self, text: str, tokens: Sequence[int], *, document: int, adds_special: bool = False
    ) -> None:
        """Compare a text with its tokens.

        Args:
            document: its number from 0.
            adds_special: whether special tokens may stand before and after the text.
        """
        if not self._is_exact:
            decoded = self.tokenizer.decode(tokens)
            self._compare(text, decoded, document=document, adds_special=adds_special)

    def check_batch(
        self, texts: Sequence[str], tokens: Sequence[Sequence[int]], *, documents: Sequence[int]
    ) -> None:
        """Compare many texts with their tokens, which are decoded on all cores."""
        if self._is_exact:
            return
        decoded = self.tokenizer.decode_batch(tokens)
        for text, found, document in zip(texts, decoded, documents, strict=True):
            self._compare(text, found, document=document, adds_special=False)

    def _compare(self, text: str, decoded: str, *, document: int, adds_special: bool) -> None:
        if decoded == text or (adds_special and text in decoded):
            return
        self.num_different += 1
        if not self.first:
            self.first = f"document {document + 1}: {describe_difference(text, decoded)}"

    def reject(self) -> None:
        """Reject texts that were changed.

        Raises:
            DataError: there are some.
        """
        if self.num_different:
            raise DataError(changed_texts(self.tokenizer.name, self.num_different, self.first))


def changed_texts(tokenizer: str, number: int, first: str) -> Fault:
    """The fault of texts that a tokenizer does not reproduce."""
    return Fault(
        KEY,
        f"{tokenizer} does not reproduce {counted(number, 'text')}",
        got=first,
        need="decode(encode(text)) == text",
        fix=f"another tokenizer, or {ACCEPT} to train on what is left of the texts",
    )


def describe_difference(text: str, decoded: str) -> str:
    """The texts around the first character in which they differ."""
    length = min(len(text), len(decoded))
    index = 0
    while index < length and text[index] == decoded[index]:
        index += 1
    start = max(index - SHOWN_CHARS // 2, 0)
    stop = start + SHOWN_CHARS
    before = text[start:stop]
    after = decoded[start:stop]
    return f"{before!r} becomes {after!r} at character {index}"
