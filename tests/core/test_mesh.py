"""The mesh: text, coordinates and groups."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.strategies import meshes_of
from tests.matrix.sweep import all_meshes
from weft.core.dimension import all_axes
from weft.core.mesh import Mesh
from weft.errors import MeshError


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    """Meshes of up to four axes."""
    names = st.lists(st.sampled_from(all_axes()), unique=True, max_size=4)
    chosen = draw(names)
    return draw(meshes_of(tuple(chosen)))


@given(meshes())
def test_text_reads_back(mesh: Mesh) -> None:
    assert Mesh.parse(mesh.text) == mesh


@given(meshes())
def test_rank_and_coordinates_are_inverse(mesh: Mesh) -> None:
    for rank in range(mesh.size):
        coord = mesh.coord(rank)
        assert mesh.rank(**coord) == rank


@settings(deadline=None, max_examples=40)
@given(meshes(), st.sets(st.sampled_from(all_axes())))
def test_groups_hold_every_rank_once_and_differ_only_along_their_axes(
    mesh: Mesh, axes: set[str]
) -> None:
    axis = tuple(axes)
    groups = mesh.groups(axis)
    members = [rank for group in groups for rank in group]
    assert sorted(members) == list(range(mesh.size))
    for group in groups:
        assert len(group) == mesh.degree(axis)
        fixed = set()
        for index, rank in enumerate(group):
            coord = mesh.coord(rank)
            outside = {name: place for name, place in coord.items() if name not in axes}
            fixed.add(tuple(outside.items()))
            assert mesh.index(rank, axis) == index
        assert len(fixed) == 1


@pytest.mark.parametrize(
    ("axis", "groups"),
    [
        ("tp", ["0 1", "2 3", "4 5", "6 7"]),
        ("dp", ["0 2", "1 3", "4 6", "5 7"]),
        ("pp", ["0 4", "1 5", "2 6", "3 7"]),
    ],
)
def test_a_group_differs_only_in_the_coordinate_of_its_axis_and_tp_varies_fastest(
    axis: str, groups: list[str]
) -> None:
    mesh = Mesh.parse("pp2 dp2 tp2")
    found = []
    for ranks in mesh.groups(axis):
        found.append(" ".join(map(str, ranks)))
    assert found == groups


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dp2 xp2", "unknown axis 'xp'"),
        ("dp2 dp4", "appears twice"),
        ("dp0", "degree 0"),
        ("dp", "cannot read 'dp'"),
        ("2dp", "cannot read '2dp'"),
        ("dp2 tpp2", "did you mean 'tp'?"),
    ],
)
def test_a_wrong_text_is_named(text: str, said: str) -> None:
    with pytest.raises(MeshError, match="mesh: ") as error:
        Mesh.parse(text)
    assert said in str(error.value)


def test_all_faults_of_a_text_are_reported_together() -> None:
    with pytest.raises(MeshError) as error:
        Mesh.parse("xp2 dp0 7")
    assert len(error.value.faults) == 3


def test_every_mesh_lists_each_mesh_once() -> None:
    found = list(all_meshes(16, ("pp", "dp", "tp")))
    degrees = itertools.product(range(1, 17), repeat=3)
    expected = [each for each in degrees if math.prod(each) <= 16]
    assert len(found) == len(set(found)) == len(expected)
    for mesh in found:
        expected_size = math.prod(degree for _, degree in mesh.axes)
        assert mesh.size == expected_size


def test_overview_lists_the_groups_of_every_axis() -> None:
    text = Mesh.parse("dp2 tp2").overview()
    assert "2 groups: [0 2] [1 3]" in text
    assert "2 groups: [0 1] [2 3]" in text


@pytest.mark.parametrize("text", ["dp1024 tp8", "pp8 dp1024", "pp16 dp16 cp16 tp16"])
def test_overview_of_a_large_mesh_fits_80_columns(text: str) -> None:
    overview = Mesh.parse(text).overview()
    assert max(map(len, overview.splitlines())) <= 80
    assert "more" in overview


def test_a_long_group_is_shown_by_its_ends_and_step() -> None:
    assert "[0 8 ... 1016 (step 8)] ... 7 more" in Mesh.parse("dp128 tp8").overview()
