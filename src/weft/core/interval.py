"""A predicted figure with the range in which the measured one is expected."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Interval:
    """A prediction: `low <= mid <= high`, all in one unit.

    Attributes:
        low, high: ends of the range in which 80% of the measured figures lay when the prediction
            was calibrated.
        mid: the prediction itself.
    """

    low: float
    mid: float
    high: float

    def scaled(self, factor: float) -> Interval:
        """The interval in another unit, or of `factor` times as much; factor > 0."""
        return Interval(self.low * factor, self.mid * factor, self.high * factor)

    def holds(self, measured: float) -> bool:
        """Whether a measured figure lies in the range."""
        return self.low <= measured <= self.high
