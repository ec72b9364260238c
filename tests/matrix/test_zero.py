"""ZeRO 1 to 3 under every other dimension == one device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.matrix.layouts import Case
from tests.matrix.test_matrix import Check

MESHES = (
    Case("dp2", family="gpt2"),
    Case("dp3", grouped=True),
    Case("dp2 tp2", family="gpt2", sequence=True),
    Case("pp2 dp2", family="gpt2"),
    Case("pp2 dp2 tp2", schedule="interleaved", chunks=2, sequence=True),
    Case("pp2 dp3", grouped=True, schedule="gpipe"),
    Case("tp2", sequence=True),
    Case("pp2"),
)
TIED_TWICE_HERE = (  # embedding and head share a parameter and a rank, whose backwards are split
    Case("pp2 dp2", family="gpt2", schedule="zbv", chunks=2, microbatches=2, zero=1),
    Case("dp3", family="gpt2", schedule="dual_pipe_v", chunks=2, microbatches=2, zero=1),
)
CASES = [replace(case, zero=zero) for case in MESHES for zero in (1, 2, 3)] + [*TIED_TWICE_HERE]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_zero_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)
