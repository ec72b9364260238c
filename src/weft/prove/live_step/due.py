"""Which steps of a run are compared with one device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Due:
    """Which steps are compared.

    Attributes:
        first: the first step of this start; None: not because it is the first.
        every: and each step whose number this divides; 0: none.
    """

    first: int | None
    every: int = 0

    def __call__(self, number: int) -> bool:
        """Whether step `number` is compared."""
        return number == self.first or (self.every > 0 and number % self.every == 0)
