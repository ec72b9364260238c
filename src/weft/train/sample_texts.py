"""Texts that the model generates on the layout that trains it: every n steps, and after the last one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from weft.parallel.model.parallelize import ParallelModel

PROMPT = "def "


class GenerateText(Protocol):
    """Continues a prompt; called on every rank, equal on every rank. It leaves the model as it was."""

    def __call__(
        self, model: ParallelModel, prompt: str, *, on_token: Callable[[], object]
    ) -> str: ...


@dataclass(frozen=True)
class SampleTexts:
    """When the model generates a text, and how.

    Attributes:
        every: steps between two texts; 0: one after the last step alone.
        last_step: of the run, which has a text in any case.
    """

    model: ParallelModel
    generate: GenerateText
    every: int
    last_step: int

    def is_due(self, step: int) -> bool:
        """Whether a text follows step `step` (the first is 1), which is not the last one."""
        return bool(self.every) and step % self.every == 0 and step < self.last_step

    def event(self, step: int, *, on_token: Callable[[], object]) -> dict[str, Any]:
        """The `sample` event after a step; every rank must call it.

        Args:
            on_token: called before each token: no rank hangs while there is one.
        """
        start_s = time.perf_counter()
        text = self.generate(self.model, PROMPT, on_token=on_token)
        seconds = time.perf_counter() - start_s
        fields = {"step": step, "prompt": PROMPT, "text": text, "seconds": seconds}
        return {"event": "sample", **fields}
