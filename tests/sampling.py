"""Cases of a sweep of which some run by default, spread over the sweep; `make slow` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
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
