"""A step that is compared: what the layout has computed of it, and what one rank has computed of the plain one."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from weft.prove.live_step.gradient_rows import GradientRows
from weft.prove.live_step.initial_values import InitialValues
from weft.prove.live_step.output_sketch import OutputSketches
from weft.prove.live_step.own_updates import OwnUpdates
from weft.prove.live_step.plain_pass import PassNumbers
from weft.prove.live_step.whole_params import WholeParameters
from weft.train.step import ComputedStep
from weft.train.step_stats import StepTotals


@dataclass(frozen=True)
class PlainStep:
    """What one rank has computed and found of a step as one device computes it."""

    numbers: PassNumbers
    rows: GradientRows
    whole: WholeParameters
    initial: InitialValues


@dataclass
class LiveStep:
    """A step whose gradients are reduced.

    Attributes:
        batch_number: of the global batch, from 0.
        plain_targets: targets of the step, counted by the definition of the data.
        updates: what its update is made of; None: that is not compared.
        verdict: what was compared of it.
    """

    number: int
    batch_number: int
    sketches: OutputSketches
    computed: ComputedStep
    totals: StepTotals
    plain_targets: int = 0
    updates: OwnUpdates | None = None
    verdict: dict[str, Any] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """The logged loss."""
        return self.totals.loss

    @property
    def norm(self) -> float:
        """The logged gradient norm."""
        return self.totals.grad_norm / self.computed.scale

    @property
    def targets(self) -> int:
        """The logged number of targets."""
        return self.totals.targets

    @property
    def is_finite(self) -> bool:
        """Whether there are numbers to compare."""
        return bool(torch.isfinite(torch.tensor([self.loss, self.norm])).all())
