"""Recomputation under every other dimension == one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.matrix.layouts import Case, shallow
from tests.matrix.test_matrix import Check
from tests.sampling import sampled
from weft.layout.plan import Recompute

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
MODES: tuple[Recompute, Recompute] = ("selective", "full")


def cases() -> Iterator[object]:
    """Every layout with the modes in turn in `make test`, with both in `make matrix`."""
    yield Case("pp2 dp2", zero=3, layers=4, recompute="full:1+selective/none")
    for number, layout in enumerate(LAYOUTS):
        for mode in MODES:
            is_quick = MODES[number % 2] == mode
            marks = () if is_quick else pytest.mark.slow
            yield pytest.param(replace(shallow(layout), recompute=mode), marks=marks)


@pytest.mark.parametrize("case", sampled(cases()), ids=str)
def test_recomputation_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)
