"""Compare a recorded run with its first steps trained again on one process, number by number."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from weft.prove.trace import relative_difference

BOUNDS = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 4e-3, "float16": 5e-4}
"""Largest relative difference that rounding explains after some dozens of steps (16 bits:
`DRIFT_AFTER`), by compute dtype.

Float32 rounds at 6e-8; the loss sums thousands of terms in another order on every layout, and each
step of AdamW starts from the last one's differences. Measured on the default job: 1e-6 after 10
steps. A wrong reduction shows as 1e-2 or more in the gradient norm of the first step. Of 16-bit
types it is one rounding, eps / 2. Measured in the first 5 steps of the default job on tp2: 3e-4 in
bfloat16, 1e-5 in float16."""

DRIFT_AFTER = {"bfloat16": 5, "float16": 5}
"""Steps after which two orders of summation train two different models: the default job on tp2
differs from one process by 0.7 of the gradient norm within 20 steps, while its loss is 0.02 off.
Those steps prove nothing, either way."""


@dataclass(frozen=True)
class StepPair:
    """The same step, recorded on a layout and trained again on one process."""

    step: int
    loss: float
    loss_alone: float
    norm: float
    norm_alone: float

    @property
    def loss_difference(self) -> float:
        """Relative to one process."""
        return relative_difference(self.loss, self.loss_alone)

    @property
    def norm_difference(self) -> float:
        """Relative to one process."""
        return relative_difference(self.norm, self.norm_alone)

    @property
    def largest_difference(self) -> float:
        """The larger of both."""
        return max(self.loss_difference, self.norm_difference)


def step_pairs(
    recorded: Sequence[Mapping[str, Any]],
    again: Iterable[Mapping[str, Any]],
    *,
    first: int,
) -> Iterator[StepPair]:
    """Pairs of the first `first` recorded step events and those trained again; yields each as it is
    computed.
    """
    for before, now in islice(
        zip(recorded, again, strict=False),
        first,
    ):
        yield StepPair(
            step=now["step"],
            loss=before["loss"],
            loss_alone=now["loss"],
            norm=before["grad_norm"],
            norm_alone=now["grad_norm"],
        )
