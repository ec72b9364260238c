"""Owns the loss scale: float16 gradients are computed at a scale that keeps them in range; overflow skips the step."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.errors import WeftError
from weft.layout.plan import Plan

START = 2.0**16
GROW_EVERY = 2000
"""Good steps after which the scale doubles."""
LEAST = 2.0**-14
"""The smallest normal float16: where even this is too large a scale, gradients are not finite at any."""


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss while gradients are computed.

    Attributes:
        value: a power of two, so that scaling and unscaling round nothing.
        is_dynamic: whether it follows what happens; else it stays 1.
        good_steps: finite steps since it last changed.

    Source: Micikevicius et al. 2018, Mixed Precision Training.
    """

    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0

    @staticmethod
    def of(plan: Plan) -> LossScale:
        """Dynamic where gradients are computed in float16."""
        return LossScale(START, is_dynamic=True) if plan.compute == "float16" else LossScale()

    def skips(self, *, is_finite: bool) -> bool:
        """Whether a step with such a gradient norm is left out."""
        return self.is_dynamic and not is_finite

    def after(self, *, is_finite: bool) -> LossScale:
        """The scale of the next step, given whether this step's gradient norm was a finite number on all ranks.

        Raises:
            WeftError: no scale makes the gradients finite.
        """
        if not self.is_dynamic:
            return self
        if not is_finite:
            if self.value <= LEAST:
                raise WeftError(
                    f"gradients are not finite at any loss scale down to {LEAST:g}: the model itself has overflowed in "
                    f"float16. Lower --optim.lr, or use --precision.compute bfloat16"
                )
            return replace(self, value=self.value / 2, good_steps=0)
        if self.good_steps + 1 < GROW_EVERY:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=self.value * 2, good_steps=0)
