"""The groups of a plan: one order for all ranks, in which connecting them one after the other never deadlocks."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given, settings

from weft.comm.planned_groups import planned_groups
from weft.core.mesh import Mesh

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


@given(meshes())
@settings(max_examples=60)
def test_ranks_that_connect_their_groups_one_by_one_never_wait_in_a_circle(mesh):
    waiting = {rank: list(planned_groups(mesh, rank)) for rank in range(mesh.size)}
    while any(waiting.values()):
        heads = {rank: groups[0] for rank, groups in waiting.items() if groups}
        ready = []
        for group in set(heads.values()):
            if all(heads.get(member) == group for member in group.ranks):
                ready.append(group)
        assert ready, f"{mesh}: every rank waits: {heads}"
        for group in ready:
            for member in group.ranks:
                waiting[member].pop(0)


@given(meshes())
@settings(max_examples=30)
def test_a_rank_is_in_each_of_its_groups_once(mesh):
    for rank in range(mesh.size):
        groups = planned_groups(mesh, rank)
        keys = [(group.is_pair, group.ranks) for group in groups]
        assert len(set(keys)) == len(keys)
        assert all(rank in group.ranks and len(group.ranks) > 1 for group in groups)


def test_the_world_comes_first_and_messages_last():
    groups = planned_groups(Mesh.parse("pp2 dp2 tp2"), 0)
    assert groups[0].ranks == tuple(range(8))
    assert [group.is_pair for group in groups] == sorted(group.is_pair for group in groups)
    assert [group.ranks for group in groups if group.is_pair] == [(0, 4), (4, 0)]


def test_one_rank_has_no_groups():
    assert planned_groups(Mesh.parse(""), 0) == ()
