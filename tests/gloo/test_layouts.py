"""Layouts in real processes over gloo == one device, in float64 within 1e-9."""

from __future__ import annotations

import pytest

from tests.matrix.layouts import Case, check

CASES = (
    Case("dp3", family="gpt2"),
    Case("pp2 tp2", family="gpt2", sequence=True),
    Case("pp2 dp2 tp2", schedule="interleaved", chunks=2),
    Case("pp2 dp2 tp2", grouped=True, sequence=True),
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layout_in_processes_computes_what_one_device_computes(case: Case) -> None:
    check(case, transport="processes")
