"""Families that the covering rows lack, discovered: each layout computes what one device computes."""

from __future__ import annotations

import pytest

from tests.matrix.cover import LIST, read_rows
from tests.matrix.layouts import Case
from tests.matrix.sweep import EVERY_FAMILY, family_cases
from tests.matrix.test_matrix import Check
from tests.sampling import sampled
from tests.small_models import TEXT_FAMILIES

COVERED = {case.family for case in read_rows(LIST)}


UNCOVERED = [case for case in family_cases() if case.family not in COVERED]


def in_turn(number: int, case: Case) -> object:
    """Every third layout of a family, each layout with some family, runs in `make test`; all of
    them in `make matrix`.
    """
    family, layout = divmod(number, len(EVERY_FAMILY))
    is_quick = (family + layout) % 3 == 0
    return case if is_quick else pytest.param(case, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "case", sampled(in_turn(number, case) for number, case in enumerate(UNCOVERED)), ids=str
)
def test_family_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)


def test_small_configs_support_every_layout() -> None:
    missing = {case.family: 0 for case in family_cases()}
    for case in family_cases():
        missing[case.family] += 1
    assert set(missing) == set(TEXT_FAMILIES)
    for family, count in missing.items():
        if family not in COVERED:
            assert count == len(EVERY_FAMILY)
