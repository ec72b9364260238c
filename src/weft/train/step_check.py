"""Contract of checks of a step that act between its gradients and its update, and the record of their verdicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from weft.models.common.batch import Batch
from weft.train.step import ComputedStep
from weft.train.step_stats import StepTotals

OnGradients = Callable[[ComputedStep, StepTotals], None]
"""Called on every rank when the gradients of a step are reduced, before they are clipped and used."""


class StepCheck(Protocol):
    """Checks some steps; every rank makes the same calls."""

    def is_due(self, number: int) -> bool:
        """Whether step `number` (the first is 1) is checked."""

    def watch(
        self, number: int, batch_number: int, batches: Sequence[Batch]
    ) -> AbstractContextManager[OnGradients]:
        """Observe a step while the block is open.

        Args:
            batch_number: of the global batch, from 0.
            batches: this rank's micro-batches.

        Raises:
            ProofError: on every rank, from what it yields: the step is wrong.
        """

    def take_events(self) -> Iterable[Mapping[str, Any]]:
        """Events of the steps that were checked since the last call."""


@dataclass
class ProofRecord:
    """The verdicts of a run, for the manifests of its checkpoints.

    Attributes:
        before: of the proof before the first step; empty: there was none.
        step: of the newest step that was compared while it trained; empty: there was none.
    """

    before: Mapping[str, Any] = field(default_factory=dict)
    step: Mapping[str, Any] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """The facts of the proof, as a manifest stores them."""
        facts = dict(self.before)
        if self.step:
            facts["step"] = dict(self.step)
        return facts
