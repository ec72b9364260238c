"""Every dimension that is found, alone and beside others, computes what one device computes."""

from __future__ import annotations

import pytest

from tests.matrix.cover import LIST, read_rows
from tests.matrix.layouts import Case
from tests.matrix.sweep import dimension_cases
from tests.matrix.test_matrix import Check
from weft.core.dimension import data_axis, exact_axes

COVERED = {axis for case in read_rows(LIST) for axis, _ in case.grid.axes}


def rows() -> list[object]:
    """The layouts of every dimension; those of dimensions in the covering rows are slow, but one."""
    found: list[object] = []
    for axis in exact_axes():
        first, *others = dimension_cases(axis)
        marks = [pytest.mark.slow] if axis in COVERED else []
        found.append(first if axis == data_axis() else pytest.param(first, marks=marks))
        found += [pytest.param(case, marks=marks) for case in others]
    return found


@pytest.mark.parametrize("case", rows(), ids=str)
def test_dimension_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)
