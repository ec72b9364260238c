"""Dynamic loss scale: keeps float16 gradients in range; a step whose gradients overflow is skipped."""

from __future__ import annotations

from dataclasses import dataclass, replace

from weft.errors import WeftError
from weft.layout.plan import Plan

START = 2.0**16
GROW_EVERY = 2000
"""Steps without an overflow after which the scale doubles."""
FLOOR = 2.0**-14
"""The smallest normal float16: if gradients overflow at this scale, they are not finite at any."""


@dataclass(frozen=True)
class LossScale:
    """Factor by which the loss is multiplied while gradients are computed.

    Attributes:
        value: a power of two, so scaling and unscaling are exact.
        is_dynamic: whether it follows overflows; otherwise it stays 1.
        good_steps: steps without an overflow since the last change.

    Source: Micikevicius et al. 2018, Mixed Precision Training.
    """

    value: float = 1.0
    is_dynamic: bool = False
    good_steps: int = 0

    @staticmethod
    def of(plan: Plan) -> LossScale:
        """Dynamic if gradients are computed in float16."""
        if plan.compute == "float16":
            return LossScale(START, is_dynamic=True)
        return LossScale()

    def skips(self, *, is_finite: bool) -> bool:
        """Whether a step whose gradient norm is (not) finite is skipped."""
        return self.is_dynamic and not is_finite

    def after(self, *, is_finite: bool) -> LossScale:
        """The scale of the next step, given whether the gradient norm of this step was finite.

        Raises:
            WeftError: gradients overflow at the smallest scale.
        """
        if not self.is_dynamic:
            return self
        if not is_finite:
            return self._halved()
        if self.good_steps + 1 < GROW_EVERY:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, value=self.value * 2, good_steps=0)

    def _halved(self) -> LossScale:
        if self.value <= FLOOR:
            raise WeftError(
                f"float16 gradients overflow even at the smallest loss scale, {FLOOR:g}: the model itself overflows. "
                f"Lower --optim.lr, or use --precision.compute bfloat16"
            )
        return replace(self, value=self.value / 2, good_steps=0)
