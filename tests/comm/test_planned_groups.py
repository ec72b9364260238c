"""The groups of a plan: one order for all ranks, in which connecting them one after the other never deadlocks."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from weft.comm.group import PlannedGroup, StepGroups, planned_groups
from weft.core.axes import world_partition
from weft.core.mesh import Mesh
from weft.models import FAMILIES

MAX_RANKS = 32


@st.composite
def meshes(draw):
    parts = []
    size = 1
    for axis in draw(st.permutations(("pp", "dp", "ep", "cp", "tp"))):
        degree = draw(st.sampled_from((1, 2, 3, 4)))
        if size * degree <= MAX_RANKS:
            parts.append(f"{axis}{degree}")
            size *= degree
    return Mesh.parse(" ".join(parts))


ZERO_3 = StepGroups(separates_reductions=True)


@given(meshes(), st.sampled_from((None, StepGroups(), ZERO_3)))
@settings(max_examples=60)
def test_every_rank_goes_through_the_same_partitions_of_the_world(mesh, steps):
    """So that all ranks can split each of them from the world's communicator, in one order."""
    rows = [planned_groups(mesh, rank, steps=steps) for rank in range(mesh.size)]
    assert len({len(row) for row in rows}) == 1
    for groups in zip(*rows, strict=True):
        assert len({group.axis for group in groups}) == 1
        for rank, group in enumerate(groups):
            assert rank in group.ranks
            for member in group.ranks:
                assert groups[member] == group


@given(meshes())
@settings(max_examples=30)
def test_a_partition_comes_once(mesh):
    groups = planned_groups(mesh, 0)
    count = len({group.axis for group in groups})
    assert count == len(groups)


def test_reductions_of_zero_3_have_a_second_communicator_of_the_same_ranks():
    mesh = Mesh.parse("dp2 ep2 tp2")
    plain = planned_groups(mesh, 0, steps=StepGroups())
    tokens = PlannedGroup("dp+ep", (0, 2, 4, 6), "reductions")
    experts = PlannedGroup("dp", (0, 4), "reductions")
    assert planned_groups(mesh, 0, steps=ZERO_3) == (*plain, tokens, experts)


@pytest.mark.parametrize(("family", "replicates"), [("deepseek", False), ("qwen3-moe", False)])
def test_experts_that_tp_shards_need_no_group_over_dp_and_tp(family, replicates):
    steps = StepGroups.of(zero=1, axes=FAMILIES[family].AXES)
    assert steps.replicates_expert_params == replicates
    groups = planned_groups(Mesh.parse("pp2 dp2 ep2 tp2"), 0, steps=steps)
    assert [group.axis for group in groups] == [
        "world",
        "dp+ep",
        "dp",
        "dp+ep+tp",
        "tp",
        "pp",
        "ep",
    ]


def test_a_bias_of_experts_that_tp_ranks_replicate_needs_that_group():
    steps = StepGroups.of(zero=1, axes={"*.experts.bias": ("experts", "embed")})
    groups = planned_groups(Mesh.parse("pp2 dp2 ep2 tp2"), 0, steps=steps)
    assert "dp+tp" in [group.axis for group in groups]


def test_the_world_comes_first_and_messages_have_no_groups_of_their_own():
    groups = planned_groups(Mesh.parse("pp2 dp2 tp2"), 0)
    assert groups[0].ranks == tuple(range(8))
    ranks = [group.ranks for group in groups if group.axis == "pp"]
    assert ranks == [(0, 4)]
    assert len(groups) == 5


@pytest.mark.parametrize("mesh", ["pp2 dp2 cp2 tp2", "pp16 dp64 cp2 tp8", "dp4 pp8 tp8 cp2"])
def test_a_training_run_of_four_axes_has_six_communicators_at_any_size(mesh):
    groups = planned_groups(Mesh.parse(mesh), 0, steps=StepGroups())
    assert len(groups) <= 7 if mesh.startswith("dp4 pp8") else len(groups) == 6


@given(meshes())
@settings(max_examples=60)
def test_totals_of_the_world_go_along_planned_groups_in_rank_order(mesh):
    planned = {group.ranks for group in planned_groups(mesh, 0, steps=StepGroups())}
    rows = {rank: [rank] for rank in range(mesh.size)}
    for axes in world_partition(mesh):
        assert mesh.group(0, axes) in planned
        gathered = {}
        for rank in rows:
            members = mesh.group(rank, axes)
            gathered[rank] = [number for member in members for number in rows[member]]
        rows = gathered
    for row in rows.values():
        assert row == list(range(mesh.size))


def test_one_rank_has_no_groups():
    assert planned_groups(Mesh.parse(""), 0) == ()
