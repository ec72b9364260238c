"""Formatting of counts, sizes and times with their units, and sparklines of a series of values."""

from __future__ import annotations

import math

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-=+*%#"


def count(number: float) -> str:
    """`312`, `9,876`, `10.6 M`, `405 B`."""
    if abs(number) < 1e5:
        return f"{number:,.0f}"
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g} {letter}"
    return f"{number / 1e3:.3g} k"


def memory(size_bytes: float) -> str:
    """`312 MiB`, `1.25 GiB`."""
    for unit, power in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        amount = size_bytes / 2**power
        if amount >= 1:
            digits = 2 if unit == "GiB" and amount < 10 else 0
            return f"{amount:.{digits}f} {unit}"
    return f"{size_bytes:.0f} B"


def short_time(seconds: float) -> str:
    """The time of a step: `820 us`, `166 ms`, `2.31 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s"


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
    columns = _column_means(values, min(width, len(values)))
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return "?" * len(columns)
    low = min(finite)
    high = max(finite)
    return "".join(_block(value, low, high, blocks) for value in columns)


def _column_means(values: list[float], num_columns: int) -> list[float]:
    means: list[float] = []
    for column in range(num_columns):
        start = column * len(values) // num_columns
        end = (column + 1) * len(values) // num_columns
        share = values[start:end]
        means.append(sum(share) / len(share))
    return means


def _block(value: float, low: float, high: float, blocks: str) -> str:
    if not math.isfinite(value):
        return "?"
    if high <= low:
        return blocks[0]
    height = (value - low) / (high - low)
    level = int(height * len(blocks))
    return blocks[min(level, len(blocks) - 1)]
