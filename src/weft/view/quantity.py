"""Owns how a number becomes a word with its unit."""

from __future__ import annotations

import math

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-=+*%#"


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
        if size_bytes >= 2**power:
            amount = size_bytes / 2**power
            return f"{amount:.2f} {unit}" if unit == "GiB" and amount < 10 else f"{amount:.0f} {unit}"
    return f"{size_bytes:.0f} B"


def short_time(seconds: float) -> str:
    """A step's time: `820 us`, `166 ms`, `2.31 s`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"


def clock(seconds: float) -> str:
    """A run's time: `0:42`, `1:02:03`, `3d 04:05`; `-` when it is unknown."""
    if not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour:02}:{minute:02}"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def sparkline(values: list[float], width: int, *, blocks: str = BLOCKS) -> str:
    """The course of `values` in at most `width` columns, each the mean of its share; numbers that are none are `?`."""
    columns = [_mean(share) for share in _shares(values, width)]
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return "?" * len(columns)
    low, high = min(finite), max(finite)
    return "".join(_block(value, low, high, blocks) for value in columns)


def _shares(values: list[float], width: int) -> list[list[float]]:
    columns = min(width, len(values))
    return [values[i * len(values) // columns : (i + 1) * len(values) // columns] for i in range(columns)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _block(value: float, low: float, high: float, blocks: str) -> str:
    if not math.isfinite(value):
        return "?"
    height = (value - low) / (high - low) if high > low else 0.0
    return blocks[min(int(height * len(blocks)), len(blocks) - 1)]
