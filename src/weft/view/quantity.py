"""Formatting of counts, sizes and times with their units, and sparklines of a series of values."""

from __future__ import annotations

import math
from dataclasses import dataclass

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"


@dataclass(frozen=True)
class Scale:
    """A unit, and the size of one of it."""

    unit: str
    size: float


COUNT_SCALES = (Scale("T", 1e12), Scale("B", 1e9), Scale("M", 1e6), Scale("k", 1e3))
MEMORY_SCALES = (Scale("GiB", 2**30), Scale("MiB", 2**20), Scale("KiB", 2**10), Scale("B", 1))


def count(number: float) -> str:
    """`312`, `9,876`, `10.6 M`, `405 B`."""
    if abs(number) < 1e5:
        return f"{number:,.0f}"
    for scale in COUNT_SCALES:
        amount = number / scale.size
        if abs(amount) >= 0.9995:
            break
    return f"{amount:.3g} {scale.unit}"


def memory(size_bytes: float) -> str:
    """`312 MiB`, `1.25 GiB`."""
    for scale in MEMORY_SCALES:
        amount = size_bytes / scale.size
        if amount >= 1:
            break
    is_small_gib = scale.unit == "GiB" and amount < 10
    digits = 2 if is_small_gib else 0
    return f"{amount:.{digits}f} {scale.unit}"


def short_time(seconds: float) -> str:
    """The time of a step: `820 us`, `166 ms`, `2.31 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


def percent(share: float) -> str:
    """A share as `45%`, `3.1%`, `0.24%`: two digits at least, so that a small one is not 0%."""
    number = 100 * share
    if number < 10:
        return f"{number:.2g}%"
    return f"{number:.0f}%"


def clock(seconds: float) -> str:
    """The time of a run: `0:42`, `1:02:03`, `3d 04:05`; `-` if it is unknown."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    if hours:
        return f"{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}"


def sparkline(values: list[float], width: int, *, blocks: str = BLOCKS) -> str:
    """`values` in at most `width` columns, each the mean of its share; NaN and infinity are `?`."""
    num_columns = min(width, len(values))
    means = _column_means(values, num_columns)
    finite = [mean for mean in means if math.isfinite(mean)]
    if not finite:
        return "?" * num_columns
    low = min(finite)
    high = max(finite)
    curve = ""
    for mean in means:
        curve += _block(mean, low, high, blocks)
    return curve


def _column_means(values: list[float], num_columns: int) -> list[float]:
    means: list[float] = []
    start = 0
    for column in range(num_columns):
        end = (column + 1) * len(values) // num_columns
        share = values[start:end]
        mean = sum(share) / len(share)
        means.append(mean)
        start = end
    return means


def _block(value: float, low: float, high: float, blocks: str) -> str:
    if not math.isfinite(value):
        return "?"
    if high <= low:
        return blocks[0]
    height = (value - low) / (high - low)
    level = int(height * len(blocks))
    highest = len(blocks) - 1
    return blocks[min(level, highest)]
