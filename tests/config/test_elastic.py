"""Elastic layouts: the best valid mesh of fewer ranks, with the same global batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.elastic import elastic_note, fit_to_ranks, smaller_meshes
from weft.config.load import load
from weft.config.rules.config_checks import config_checks
from weft.core.mesh import Mesh
from weft.models import FAMILIES


def fit(mesh: str, size: int, *, global_size: int = 16, zero: int = 0) -> str | None:
    batch = ["--batch.global_size", str(global_size), "--batch.micro_size", "1"]
    run = load(["--mesh", mesh, *batch, "--parallel.zero", str(zero)], FAMILIES)

    def is_valid(smaller: str) -> bool:
        checks = config_checks(run.with_values({"mesh": smaller}))
        return not any(check.fails() for check in checks)

    return fit_to_ranks(run.device_mesh, size, is_valid=is_valid)


@pytest.mark.parametrize(
    ("mesh", "size", "expected"),
    [
        ("dp4 tp2", 8, "dp4 tp2"),
        ("dp4 tp2", 4, "dp2 tp2"),
        ("dp4 tp2", 2, "tp2"),
        ("dp4 tp2", 1, "dp1"),
        ("dp8", 4, "dp4"),
        ("dp2 pp2 tp2", 4, "pp2 tp2"),
        ("dp2 pp2 tp2", 2, "tp2"),
        ("cp2 dp2 tp2", 2, "tp2"),
        ("cp2 dp2", 2, "cp2"),
        ("pp2 tp2", 2, "tp2"),
        ("pp4", 2, "pp2"),
        ("dp4 tp2", 6, None),
        ("site2 dp2", 2, "site1 dp2"),
        ("site4 dp2", 4, "site2 dp2"),
        ("site4 dp2 tp2", 8, "site2 dp2 tp2"),
        ("site2", 1, "site1"),
        ("dp8", 5, None),
        ("dp4", 8, None),
    ],
)
def test_data_parallelism_shrinks_first(mesh, size, expected):
    assert fit(mesh, size) == expected


@pytest.mark.parametrize(
    ("mesh", "size", "expected"),
    [
        ("dp2 fsdp4", 4, "fsdp4"),
        ("dp2 fsdp4", 6, "dp2 fsdp3"),
        ("fsdp4", 3, "fsdp3"),
        ("fsdp4 tp2", 2, "tp2"),
        ("fsdp4 tp2", 6, "fsdp3 tp2"),
    ],
)
def test_shards_of_states_stay_as_small_as_the_ranks_allow(mesh, size, expected):
    assert fit(mesh, size, global_size=24, zero=3) == expected


def test_a_number_of_data_ranks_need_not_divide_the_configured_one():
    assert fit("dp4 tp2", 6, global_size=12) == "dp3 tp2"


@given(
    st.dictionaries(st.sampled_from(["dp", "pp", "tp", "cp"]), st.sampled_from([1, 2, 4, 6])),
    st.integers(1, 64),
)
def test_smaller_meshes_have_the_size_and_divisors_of_the_other_degrees(degrees, size):
    mesh = Mesh(tuple(degrees.items()))
    for text in smaller_meshes(mesh, size):
        smaller = Mesh.parse(text)
        assert smaller.size == size
        for axis, degree in smaller.axes:
            assert axis == "dp" or mesh.degree(axis) % degree == 0


def test_the_note_names_both_layouts():
    assert elastic_note(Mesh.parse("dp2"), Mesh.parse("dp4")) == (
        "2 of 4 ranks: layout dp2 instead of dp4 (run.elastic), same global batch"
    )
