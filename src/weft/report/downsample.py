"""Downsampling of a curve: the least and the largest value of each bucket are kept, so that no spike is lost."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Curve:
    """Points of a curve, in order of x.

    Attributes:
        x, y: the points; of a long curve, two of each bucket.
        mean_x, mean_y: the means of the buckets, which smoothing reads; of a short curve its points.
        total: number of points before downsampling.
    """

    x: NDArray[np.float64]
    y: NDArray[np.float64]
    mean_x: NDArray[np.float64]
    mean_y: NDArray[np.float64]
    total: int

    @property
    def is_whole(self) -> bool:
        """Whether every point is kept."""
        return len(self.x) == self.total


def downsampled(x: NDArray[np.float64], y: NDArray[np.float64], *, most: int) -> Curve:
    """The curve with at most `most` points; those that are not finite are left out.

    ```
    bucket      |  a b c d  |  e f g h  |
    is kept     |   min max |  max  min |     in their own places
    ```
    """
    finite = np.isfinite(y)
    x, y = x[finite], y[finite]
    if len(x) <= most:
        return Curve(x, y, x, y, len(x))
    bounds = np.linspace(0, len(x), max(most // 2, 1) + 1).astype(int)
    kept: list[int] = []
    for start, stop in pairwise(bounds.tolist()):
        bucket = y[start:stop]
        kept += sorted({start + int(bucket.argmin()), start + int(bucket.argmax())})
    sizes = np.diff(bounds)
    means_x = np.add.reduceat(x, bounds[:-1]) / sizes
    means_y = np.add.reduceat(y, bounds[:-1]) / sizes
    return Curve(x[kept], y[kept], means_x, means_y, len(x))
