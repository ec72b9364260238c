"""First and last stages without a layer (the embedding, the head): each layout computes what one device computes."""

from __future__ import annotations

import pytest

from tests.matrix.layouts import Case
from tests.matrix.test_matrix import Check

QUICK = (
    Case(
        "pp2 tp2",
        family="gpt2",  # tied
        schedule="interleaved",
        chunks=2,
        layers=2,
        sequence=True,
        microbatches=2,
    ),
    Case("pp2 dp2", schedule="zbv", chunks=2, layers=2, grouped=True, zero=1, microbatches=2),
    Case("pp2", family="deepseek", layers=2, split="2 0", recompute="full", microbatches=2),
)
OTHERS = (
    Case("pp3", layers=2, split="0 2 0"),
    Case("pp2", layers=2, split="0 2", schedule="gpipe"),
    Case("pp2", layers=2, split="2 0", schedule="zero_bubble"),
    Case("pp3", layers=3, split="0 3 0", schedule="zero_bubble_h2", family="gpt2"),
    Case("pp4", layers=2),
    Case("pp3", layers=2, family="gpt2"),
    Case("pp2 dp2", layers=2, grouped=True, schedule="dual_pipe_v", chunks=2, zero=2),
    Case("pp2 dp2", layers=2, family="gpt2", schedule="zbv", chunks=2, zero=3),
    Case("pp2 dp2", layers=4, grouped=True, schedule="interleaved", chunks=3, zero=3),
    Case("pp2 dp2", layers=4, family="gpt2", schedule="interleaved", chunks=3, zero=2),
    Case("pp2 cp2 tp2", layers=2, schedule="dual_pipe_v", chunks=2, sequence=True, documents=True),
    Case("pp2 ep2", layers=2, family="qwen3-moe", schedule="interleaved", chunks=2),
    Case(
        "pp2 ep2 tp2", layers=2, family="deepseek", schedule="zbv", chunks=2, sequence=True, zero=1
    ),
    Case("pp4", layers=2, family="deepseek", schedule="1f1b", recompute="selective"),
    Case("pp2 dp2", layers=2, family="mistral", schedule="interleaved", chunks=2, recompute="full"),
    Case("pp3", layers=2, split="0 2 0", family="gemma3", recompute="selective"),
    Case("pp4 dp2", layers=2, family="gpt2", zero=3, recompute="full"),
)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_stage_without_layers_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_other_stages_without_layers_compute_what_one_device_computes(
    case: Case, check: Check
) -> None:
    check(case)
