"""Mixtures of experts, latent attention and multi-token prediction under every dimension == one device."""

from __future__ import annotations

import pytest

from tests.matrix.layouts import Case, shallow
from tests.matrix.test_matrix import Check
from tests.sampling import sampled

CASES = (
    Case("", family="deepseek"),
    Case("ep2", family="deepseek"),
    Case("ep4", family="qwen3-moe"),
    Case("tp2", family="deepseek", sequence=True),
    Case("ep2 tp2", family="qwen3-moe", sequence=True),
    Case("pp2", family="deepseek"),
    Case("cp2", family="deepseek"),
    Case("ep2 cp2", family="qwen3-moe"),
    Case("pp2 dp2 ep2", family="deepseek", zero=1),
    Case("dp2 ep2", family="qwen3-moe", zero=3),
    Case("ep2 cp2 tp2", family="deepseek", sequence=True, microbatches=2),
    Case("pp2 dp2 tp2", family="qwen3", sequence=True),
)
MORE_CASES = (
    Case("pp2 dp2 ep2 cp2 tp2", family="deepseek", sequence=True, microbatches=2, layers=2),
    Case("dp2 ep2", family="deepseek"),
    Case("tp2", family="deepseek"),
    Case("pp2 ep2 tp2", family="deepseek", sequence=True),
    Case("tp2", family="qwen3"),
)
"""Larger ones, and parts of those above."""


@pytest.mark.slow
@pytest.mark.parametrize("case", MORE_CASES, ids=str)
def test_more_mixtures_compute_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)


@pytest.mark.parametrize("case", sampled(shallow(case) for case in CASES), ids=str)
def test_mixture_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)
