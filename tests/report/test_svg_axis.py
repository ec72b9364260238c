"""The axes of drawn charts: round values, and whole numbers for steps."""

from __future__ import annotations

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
