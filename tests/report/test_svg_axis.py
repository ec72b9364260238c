"""The axes of drawn charts: round values, and whole numbers for steps."""

from __future__ import annotations

import math

import pytest

from weft.report.svg_charts import Axis


@pytest.mark.parametrize(
    ("high", "least", "ticks"),
    [
        (3, 1, [1, 2, 3]),
        (3, 0, [1, 1.5, 2, 2.5, 3]),
        (1, 1, [1]),
        (1000, 1, [200, 400, 600, 800, 1000]),
    ],
)
def test_ticks_are_round_and_whole_where_they_count_steps(
    high: int, least: float, ticks: list[float]
) -> None:
    axis = Axis.over([1, high], start=0, end=100)
    assert list(axis.ticks(least=least)) == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ((2e-8, 3e-6), [1e-8, 1e-7, 1e-6, 1e-5]),
        ((1e-7, 1e-7), [1e-7, 1e-6]),
        ((1e-12, 1e-1), [1e-12, 1e-9, 1e-6, 1e-3]),
    ],
)
def test_a_log_axis_holds_its_values_between_powers_of_ten(
    values: tuple[float, float], ticks: list[float]
) -> None:
    axis = Axis.of_decades(values, start=100, end=0)
    assert list(axis.ticks()) == pytest.approx(ticks)
    assert all(0 <= axis.at(value) <= 100 for value in values)
    assert axis.at(ticks[0]) - axis.at(ticks[1]) == pytest.approx(
        100 * math.log10(ticks[1] / ticks[0]) / (axis.high - axis.low)
    )
