"""Streaming detokenization: text of tokens as they arrive, in whole characters, cut before the stop text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

UNFINISHED = "\N{REPLACEMENT CHARACTER}"

FinishReason = Literal["length", "stop", "end of text", "context", "interrupted"]
"""Why a text is finished: it has all its tokens, the stop text came, the model ended it, the model
has no more positions, the user stopped it.
"""


class TokenDecoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of tokens; what is no text shows as replacement characters."""


class StreamDetokenizer:
    """Text of tokens, piece by piece: the pieces joined are the text of all tokens.

    Tokens may hold parts of a character, so the replacement characters at the end of a text are not
    final, of which some tokenizers give one for each byte: they are held back until more tokens or
    the end have come. Tokens are
    decoded from the last place that lay between two characters, with the tokens before it, since
    some tokenizers drop a space at the beginning of what they decode.
    """

    def __init__(self, tokenizer: TokenDecoder) -> None:
        self.tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []
        self._num_returned = 0

    def add(self, token: int) -> str:
        """The text that is final now that this token has come."""
        self._pending.append(token)
        text = self._pending_text()
        is_unfinished = text.endswith(UNFINISHED)
        final = text.rstrip(UNFINISHED)[self._num_returned :]
        self._num_returned += len(final)
        # only from here on: a place inside a character would decode to something else
        if not is_unfinished:
            self._before = self._pending
            self._pending = []
            self._num_returned = 0
        return final

    def flush(self) -> str:
        """What was held back; no token follows."""
        final = self._pending_text()[self._num_returned :]
        self._num_returned += len(final)
        return final

    def _pending_text(self) -> str:
        # decoded with what came before, and that cut off again: the first token alone may lose its space
        known = self.tokenizer.decode(self._before)
        tokens = [*self._before, *self._pending]
        text = self.tokenizer.decode(tokens)
        return text[len(known) :]


class GeneratedText:
    """The text of one row in progress, up to its stop text.

    Attributes:
        text: what is final so far.
        finish_reason: why it is finished; None while it is not.
    """

    def __init__(
        self, tokenizer: TokenDecoder, *, stop: str = "", end_tokens: frozenset[int] = frozenset()
    ) -> None:
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._detokenizer = StreamDetokenizer(tokenizer)
        self._stop = stop
        self._end_tokens = end_tokens
        self._held = ""

    def add(self, token: int) -> None:
        """Continue with a token; one that ends the text is no part of it."""
        if token in self._end_tokens:
            self.finish("end of text")
        else:
            self._add_text(self._detokenizer.add(token))

    def finish(self, reason: FinishReason) -> None:
        """No token follows."""
        if self.finish_reason is None:
            self._add_text(self._detokenizer.flush())
        if self.finish_reason is None:  # the last characters may have completed the stop text
            self.text += self._held
            self._held = ""
            self.finish_reason = reason

    def _add_text(self, piece: str) -> None:
        held = self._held + piece
        if self._stop and self._stop in held:
            before_stop, _, _ = held.partition(self._stop)
            self.text += before_stop
            self._held = ""
            self.finish_reason = "stop"
            return
        # what may be the beginning of the stop text waits for what follows
        num_final = len(held) - overlap(held, self._stop)
        self.text += held[:num_final]
        self._held = held[num_final:]


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, short of all of it.

    >>> overlap("a\\n\\n", "\\n\\n\\n"), overlap("ab", "x"), overlap("ab", "")
    (2, 0, 0)
    """
    longest = min(len(stop) - 1, len(text))
    for length in range(longest, 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
