"""Output of generated texts: the first one streams, further ones follow when they are whole; or one JSON object each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.generate.detokenize import GeneratedText

BOLD, PLAIN = "\x1b[1m", "\x1b[0m"


@dataclass(frozen=True)
class OutputText:
    """One text: its prompt, and what is generated so far."""

    prompt: str
    sample: int
    tokens: Sequence[int]
    generated: GeneratedText


class TextOutput:
    """Texts in order, each as soon as it can be shown.

    Args:
        write: takes text and shows it at once.
        is_terminal: then prompts are bold.
    """

    def __init__(
        self,
        texts: Sequence[OutputText],
        *,
        write: Callable[[str], object],
        is_terminal: bool = False,
    ) -> None:
        self.texts = texts
        self.write = write
        self.is_terminal = is_terminal
        self._current = 0
        self._num_shown = -1

    def update(self) -> None:
        """Show what is new."""
        while self._current < len(self.texts):
            text = self.texts[self._current]
            if self._num_shown < 0:
                self._show_head(text)
                self._num_shown = 0
            new = text.generated.text[self._num_shown :]
            if new:
                self.write(new)
                self._num_shown += len(new)
            if text.generated.finish_reason is None:
                return
            self.write("\n")
            self._current += 1
            self._num_shown = -1

    def _show_head(self, text: OutputText) -> None:
        num_texts = len(self.texts)
        if num_texts > 1:
            gap = "\n" if self._current > 0 else ""
            number = self._current + 1
            self.write(f"{gap}--- {number} of {num_texts}\n")
        if self.is_terminal and text.prompt:
            self.write(f"{BOLD}{text.prompt}{PLAIN}")
        else:
            self.write(text.prompt)


class JsonOutput:
    """One JSON object a line for each text, in order, as soon as it is finished.

    Args:
        facts: what every object holds besides.
    """

    def __init__(
        self, texts: Sequence[OutputText], *, write: Callable[[str], object], facts: dict[str, Any]
    ) -> None:
        self.texts = texts
        self.write = write
        self.facts = facts
        self._current = 0

    def update(self) -> None:
        """Write the texts that are finished."""
        while self._current < len(self.texts):
            text = self.texts[self._current]
            if text.generated.finish_reason is None:
                return
            self.write(json.dumps(self._object(text), ensure_ascii=False) + "\n")
            self._current += 1

    def _object(self, text: OutputText) -> dict[str, Any]:
        return {
            "prompt": text.prompt,
            "sample": text.sample,
            "text": text.generated.text,
            "tokens": list(text.tokens),
            "end": text.generated.finish_reason,
            **self.facts,
        }


def to_stdout(text: str) -> None:
    """Write and flush; characters that the terminal lacks are replaced, and a closed pipe is no
    error.
    """
    encoding = sys.stdout.encoding or "utf-8"
    try:
        sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
        sys.stdout.flush()
    except BrokenPipeError:
        # the interpreter flushes at its end, and would report the pipe again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
