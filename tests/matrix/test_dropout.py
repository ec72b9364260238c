"""Dropout and noise on embeddings under every dimension == one device: the same random numbers, in float64 within 1e-9."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.matrix.layouts import Case, shallow
from tests.matrix.layouts import check as check_layout
from tests.matrix.test_matrix import Check
from tests.one_device import PATIENCE_S
from tests.sampling import sampled

pytestmark = pytest.mark.timeout(PATIENCE_S)

LAYOUTS = (
    Case("dp2"),
    Case("dp2", zero=3),
    Case("tp2"),
    Case("tp2", sequence=True),
    Case("cp2", context="ring"),
    Case("cp2", context="allgather", documents=True),
    Case("cp2", context="ulysses"),
    Case("cp2 tp2", sequence=True),
    Case("pp2"),
    Case("pp2", schedule="zbv", chunks=2),
    Case("pp2", schedule="zero_bubble", recompute="full"),
    Case("pp2 dp2 tp2"),
    Case("dp2 tp2", recompute="selective"),
    Case("dp2 cp2", recompute="full"),
    Case("dp2", microbatches=1, micro_size=4),
)
EXPERTS = (
    Case("ep2", family="qwen3-moe"),
    Case("ep2 tp2", family="qwen3-moe", zero=1),
    Case("ep2 cp2", family="deepseek", zero=3),
)


def cases() -> Iterator[Case]:
    """GPT-2 with its own dropout, LLaMA with that of adapters on every layout; mixtures of experts."""
    for layout in LAYOUTS:
        yield shallow(replace(layout, family="gpt2", dropout=0.2))
        yield shallow(replace(layout, dropout=0.3))
    for layout in EXPERTS:
        yield replace(layout, dropout=0.3)


@pytest.mark.parametrize("case", sampled(cases()), ids=str)
def test_drop_out_is_that_of_one_device(case: Case, check: Check) -> None:
    check(case)


NOISY = (
    Case("dp2", documents=True),
    Case("tp2", sequence=True),
    Case("tp2", family="gemma3", documents=True),
    Case("cp2", context="allgather", documents=True),
    Case("cp2 tp2", family="gpt2", dropout=0.2, sequence=True, documents=True, context="allgather"),
    Case("pp2", schedule="zero_bubble", recompute="full"),
    Case("dp2", microbatches=1, micro_size=4, zero=3),
)


@pytest.mark.parametrize("case", [shallow(replace(case, neftune=5.0)) for case in NOISY], ids=str)
def test_noise_on_embeddings_is_that_of_one_device(case: Case, check: Check) -> None:
    check(case)


def test_drop_out_in_real_processes_is_that_of_one_device() -> None:
    case = Case("cp2 tp2", family="gpt2", dropout=0.2, sequence=True, recompute="full")
    check_layout(shallow(case), transport="processes")
