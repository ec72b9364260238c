"""Cases of a sweep of which some run by default, spread over the sweep; `make slow` runs the others."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def sampled(cases: Iterable[Any], *, every: int = 2) -> list[Any]:
    """The cases as parameters: the first of each `every` runs by default.

    A case that has marks of its own keeps them alone.
    """
    found = []
    number = 0
    for case in cases:
        if hasattr(case, "marks"):
            found.append(case)
            continue
        marks = () if number % every == 0 else (pytest.mark.slow,)
        found.append(pytest.param(case, marks=marks))
        number += 1
    return found


def sampled_pairs(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """All pairs as parameters, of which every second one runs by default, as on the white squares of a
    chess board: each value comes with half of the others.
    """
    found = []
    for row, one in enumerate(first):
        for column, other in enumerate(second):
            marks = () if (row + column) % 2 == 0 else (pytest.mark.slow,)
            found.append(pytest.param(one, other, marks=marks))
    return found
