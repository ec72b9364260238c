"""Owns the text of tokens as they come: never half a character, never a part of what might become the stop text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"

End = Literal["length", "stop", "end of text", "context"]
"""Why a text is over: it has all its tokens, the stop text came, the model ended it, the model's positions are used up."""


class Decodes(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; what is no text shows as replacement characters."""


class Spelling:
    """Text of tokens, piece by piece: the pieces joined are the text of all tokens.

    Tokens may hold parts of a character, so the end of a text is not final while it is a replacement character: it is held
    back until more tokens or the end of all have come. Text is spelled from the last place that lay between two characters,
    and with the tokens before it, since some tokenizers drop a space at the beginning of what they decode.
    """

    def __init__(self, tokenizer: Decodes) -> None:
        self.tokenizer = tokenizer
        self._before: list[int] = []
        self._open: list[int] = []
        self._said = 0

    def take(self, token: int) -> str:
        """What can be said now that this token has come."""
        self._open.append(token)
        text = self._open_text()
        is_open = text.endswith(UNFINISHED)
        final = text.removesuffix(UNFINISHED)[self._said :] if is_open else text[self._said :]
        self._said += len(final)
        if not is_open:
            self._before, self._open, self._said = self._open, [], 0
        return final

    def rest(self) -> str:
        """What was held back; nothing comes after it."""
        final = self._open_text()[self._said :]
        self._said += len(final)
        return final

    def _open_text(self) -> str:
        known = self.tokenizer.decode(self._before)
        return self.tokenizer.decode([*self._before, *self._open])[len(known) :]


class Writing:
    """One text under way, up to its stop text.

    Attributes:
        text: what is final so far.
        end: why it is over; None while it is not.
    """

    def __init__(self, tokenizer: Decodes, *, stop: str = "", ends: frozenset[int] = frozenset()) -> None:
        self.text = ""
        self.end: End | None = None
        self._spelling, self._stop, self._ends = Spelling(tokenizer), stop, ends
        self._held = ""

    def take(self, token: int) -> None:
        """Go on with a token; it may be the one that ends the text, which is no part of it."""
        if token in self._ends:
            return self.close("end of text")
        return self._add(self._spelling.take(token))

    def close(self, end: End) -> None:
        """Nothing more comes."""
        if self.end is None:
            self._add(self._spelling.rest())
        if self.end is None:  # the last characters may have made the stop text
            self.text, self._held, self.end = self.text + self._held, "", end

    def _add(self, piece: str) -> None:
        held = self._held + piece
        if self._stop and self._stop in held:
            self.text, self._held, self.end = self.text + held.partition(self._stop)[0], "", "stop"
            return
        safe = len(held) - overlap(held, self._stop)
        self.text, self._held = self.text + held[:safe], held[safe:]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it.

    >>> overlap("a\\n\\n", "\\n\\n\\n"), overlap("ab", "x"), overlap("ab", "")
    (2, 0, 0)
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
