"""Steps whose loss jumps far above those before, of runs whose guard does not look for spikes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

WINDOW, LEAST = 32, 8
"""Losses before a step that are compared with it, at most and at least."""
FACTOR = 1.5
"""A jump is so many times their median ..."""
DEVIATIONS = 10 * 1.4826
"""... and so many median absolute deviations above it: ten standard deviations of normal noise."""

FEW, MOST_SHARE = 3, 0.01
"""Jumps that are named, or up to this share of the steps."""
MOST_CANDIDATES = 1000
"""Steps that are looked at more closely: those furthest above the least loss before."""


class LossJump(NamedTuple):
    """A loss that is far above those before.

    Attributes:
        at: its place among the losses.
        median: of the losses before.
    """

    at: int
    loss: float
    median: float

    @property
    def ratio(self) -> float:
        """Of the loss to the median."""
        return self.loss / self.median


def loss_jumps(losses: NDArray[np.float64]) -> tuple[LossJump, ...]:
    """The jumps among losses, in their order; none where losses before are not finite or not above 0,
    and none of a loss that jumps as often as noise with long tails does.
    """
    padded = np.concatenate([np.full(WINDOW, np.inf), losses])
    least = sliding_window_view(padded, WINDOW).min(axis=1)[:-1]
    ratios = losses / np.where(least > 0, least, np.inf)
    ratios[:LEAST] = 0.0
    candidates = np.flatnonzero(ratios > FACTOR)
    furthest = candidates[np.argsort(-ratios[candidates])[:MOST_CANDIDATES]]
    found = tuple(_jumps_at(losses, sorted(furthest.tolist())))
    return found if len(found) <= max(FEW, MOST_SHARE * len(losses)) else ()


def _jumps_at(losses: NDArray[np.float64], places: Sequence[int]) -> Iterator[LossJump]:
    for at in places:
        before = losses[max(0, at - WINDOW) : at]
        median = float(np.median(before))
        deviation = float(np.median(np.abs(before - median)))
        if losses[at] > max(FACTOR * median, median + DEVIATIONS * deviation):
            yield LossJump(at, float(losses[at]), median)
