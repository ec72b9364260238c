"""Any layout == one device: losses, gradient norms, every gradient, every updated parameter, in float64 within 1e-9."""

from __future__ import annotations

import pytest

from tests.matrix.layouts import Case, compare, every_case, sample

TOLERANCE = 1e-9
"""Relative; float64 rounds at 1e-16 and three steps of AdamW amplify it by some orders."""

CORNERS = (
    Case("", family="gpt2"),
    Case("dp3"),
    Case("pp2", family="gpt2"),
    Case("tp2", family="gpt2", sequence=True),
    Case("tp4", grouped=True, sequence=True),
    Case("pp2 dp2 tp2", family="gpt2", schedule="interleaved", chunks=2),
    Case("tp2 dp2 pp2", sequence=True),
    Case("pp5", family="gpt2", microbatches=2),
    Case("dp2 tp8", sequence=True),
)


def check(case: Case, transport: str = "threads") -> None:
    found, missing = compare(case, transport=transport)
    assert not missing, f"no rank holds all of {missing}"
    wrong = [difference for difference in found if not difference.relative <= TOLERANCE]
    assert not wrong, f"{case}: first of {len(wrong)}: {wrong[0]}"


@pytest.mark.parametrize("case", CORNERS, ids=str)
def test_layout_computes_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("case", sample(24, seed=2026), ids=str)
def test_sampled_layout_computes_what_one_device_computes(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(every_case(), key=str), ids=str)
def test_every_layout_computes_what_one_device_computes(case: Case) -> None:
    check(case)
