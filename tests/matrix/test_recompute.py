"""Recomputation under every other dimension == one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.matrix.layouts import Case
from tests.matrix.test_matrix import Check

LAYOUTS = (
    Case("", family="gpt2"),
    Case("dp2 tp2", family="gpt2", sequence=True, zero=3),
    Case("pp2 tp2", grouped=True, zero=2),
    Case("pp2 dp2", schedule="interleaved", chunks=2, zero=3),
    Case("pp2", schedule="zero_bubble"),
    Case("pp2 tp2", schedule="zbv", chunks=2, sequence=True),
    Case("pp2 dp2", schedule="zero_bubble", zero=3, family="gpt2"),
    Case("cp2 tp2", documents=True),
    Case("cp2 dp2", context="ulysses", zero=3),
    Case("dp2", family="qwen3", zero=3),
    Case("ep2 tp2", family="deepseek", zero=1),
    Case("ep2 cp2", family="qwen3-moe", zero=3),
)
CASES = [replace(case, recompute=mode) for case in LAYOUTS for mode in ("selective", "full")]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_recomputation_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)
