"""Owns how texts reach the screen: the first one as it comes, further ones when they are whole, or one JSON object each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.generate.text import Writing

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True)
class Shown:
    """One text: where it comes from, and what is written of it so far."""

    prompt: str
    sample: int
    tokens: Sequence[int]
    writing: Writing


class Screen:
    """Texts in order, each as soon as it can be.

    Args:
        write: takes text; what it gets is to be seen at once.
        is_terminal: then prompts are bold.
    """

    def __init__(self, texts: Sequence[Shown], *, write: Callable[[str], None], is_terminal: bool = False) -> None:
        self.texts, self.write, self.is_terminal = texts, write, is_terminal
        self._at, self._said = 0, -1

    def update(self) -> None:
        """Say what can be said now."""
        while self._at < len(self.texts):
            text = self.texts[self._at]
            if self._said < 0:
                self._head(text)
                self._said = 0
            if len(text.writing.text) > self._said:
                self.write(text.writing.text[self._said :])
                self._said = len(text.writing.text)
            if text.writing.end is None:
                return
            self.write("\n")
            self._at, self._said = self._at + 1, -1

    def _head(self, text: Shown) -> None:
        if len(self.texts) > 1:
            self.write(f"{'' if self._at == 0 else chr(10)}--- {self._at + 1} of {len(self.texts)}\n")
        self.write(f"{BOLD}{text.prompt}{PLAIN}" if self.is_terminal and text.prompt else text.prompt)


class Objects:
    """One JSON object a line for each text, in order, as soon as it is over.

    Args:
        facts: what every object says besides.
    """

    def __init__(self, texts: Sequence[Shown], *, write: Callable[[str], None], facts: dict[str, Any]) -> None:
        self.texts, self.write, self.facts, self._at = texts, write, facts, 0

    def update(self) -> None:
        """Say what can be said now."""
        while self._at < len(self.texts) and (text := self.texts[self._at]).writing.end is not None:
            told = {
                "prompt": text.prompt,
                "sample": text.sample,
                "text": text.writing.text,
                "tokens": list(text.tokens),
                "end": text.writing.end,
                **self.facts,
            }
            self.write(json.dumps(told, ensure_ascii=False) + "\n")
            self._at += 1


def to_stdout(text: str) -> None:
    """Write and show at once; characters that the terminal lacks are replaced, and a reader who is gone is no error."""
    try:
        sys.stdout.write(_encodable(text))
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _encodable(text: str) -> str:
    kind = sys.stdout.encoding or "utf-8"
    return text.encode(kind, errors="replace").decode(kind)
