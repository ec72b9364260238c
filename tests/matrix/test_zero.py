"""ZeRO 1 to 3 under every other dimension == one device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import pytest

from tests.matrix.layouts import Case, shallow
from tests.matrix.test_matrix import Check
from tests.sampling import sampled
from weft.core.dimension import dimensions

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
SHARDING = tuple(name for name, each in dimensions().items() if each.shards_states)
HYBRID = tuple(  # states are sharded over one data axis, and copies along the other
    case
    for axis in SHARDING
    for case in (
        Case(f"dp2 {axis}2"),
        Case(f"{axis}2 cp2", family="gpt2"),
        Case(f"dp2 {axis}2 tp2", sequence=True),
        Case(f"pp2 dp2 {axis}2", grouped=True),
        Case(f"dp2 {axis}2 cp2", documents=True),
        Case(f"dp2 {axis}2 ep2", family="qwen3-moe", microbatches=2),
    )
)
LEVELS: tuple[Literal[1, 2, 3], ...] = (1, 2, 3)


def cases() -> Iterator[object]:
    """Every mesh with two of the three levels in turn in `make test`, with all in `make matrix`."""
    for number, mesh in enumerate(MESHES):
        for level in LEVELS:
            is_left_out = LEVELS[number % 3] == level
            marks = pytest.mark.slow if is_left_out else ()
            yield pytest.param(replace(shallow(mesh), zero=level), marks=marks)
    yield from TIED_TWICE_HERE
    for number, mesh in enumerate(HYBRID):
        for level in LEVELS:
            marks = pytest.mark.slow if LEVELS[number % 3] != level else ()
            yield pytest.param(replace(shallow(mesh), zero=level), marks=marks)


@pytest.mark.parametrize("case", sampled(cases()), ids=str)
def test_zero_computes_what_one_device_computes(case: Case, check: Check) -> None:
    check(case)
