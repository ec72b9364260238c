"""Mixtures of experts, latent attention and multi-token prediction under every dimension == one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.matrix.layouts import Case, shallow
from tests.matrix.test_matrix import Check
from tests.sampling import sampled
from weft.core import expert_choice

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


GROUPED_CASES = (
    Case("ep2 tp2", family="qwen3-moe", sequence=True, recompute="selective", layers=1),
    *(
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            Case("pp2", family="deepseek", schedule="zero_bubble"),
            Case("dp2 ep2", family="qwen3-moe", zero=3, recompute="full", layers=1),
            Case("cp2 tp2", family="deepseek"),
        )
    ),
)


def by_offsets(x_NK: Tensor, weight_EKM: Tensor, *, offs: Tensor) -> Tensor:
    """`grouped_mm`, which torch has not in float64."""
    assert offs.dtype == torch.int32
    ends = offs.tolist()
    runs = zip([0, *ends], ends, weight_EKM, strict=False)
    return torch.cat([x_NK[start:end] @ weight_KM for start, end, weight_KM in runs])


@pytest.mark.parametrize("case", GROUPED_CASES, ids=str)
def test_grouped_products_compute_what_one_device_computes(
    case: Case, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_tokens: list[int] = []

    def noted(x_NK: Tensor, weight_EKM: Tensor, *, offs: Tensor) -> Tensor:
        num_tokens.append(len(x_NK))
        return by_offsets(x_NK, weight_EKM, offs=offs)

    monkeypatch.setitem(expert_choice.GROUPED_BYTES, "float64", 8)
    monkeypatch.setattr(F, "grouped_mm", noted)
    check(case)
    assert sum(num_tokens) > 0
