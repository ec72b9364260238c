"""Placements of ranks on nodes: in order, in turn, uneven; orders of a mesh's axes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.mesh import Mesh
from weft.core.node_placement import NodePlacement, orders

COUNTS = st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)


@given(COUNTS, st.integers(1, 6))
def test_ranks_in_turn_fill_the_same_nodes(counts: tuple[int, ...], block: int) -> None:
    placement = NodePlacement.in_turn(counts, block=block)
    assert placement.counts == counts
    assert placement.filled_in_order == NodePlacement.by_node(counts)
    assert sorted(sum(map(placement.ranks_of, range(len(counts))), ())) == list(range(sum(counts)))


def test_ranks_take_nodes_in_turn_while_there_is_room() -> None:
    assert NodePlacement.in_turn((3, 1, 2)).node_of == (0, 1, 2, 0, 2, 0)
    assert NodePlacement.in_turn((4, 3), block=2).node_of == (0, 0, 1, 1, 0, 0, 1)
    assert NodePlacement.even(6, 4) == NodePlacement.by_node((4, 2))


@pytest.mark.parametrize(
    ("placement", "tp", "dp"),
    [
        (NodePlacement.even(8, 4), 1, 2),
        (NodePlacement.in_turn((4, 4)), 2, 1),
        (NodePlacement.by_node((3, 5)), 2, 2),
        (NodePlacement.even(8, 8), 1, 1),
    ],
)
def test_groups_are_on_so_many_nodes(placement: NodePlacement, tp: int, dp: int) -> None:
    mesh = Mesh.parse("dp4 tp2")
    assert placement.most_nodes(mesh, ("tp",)) == tp
    assert placement.most_nodes(mesh, ("dp",)) == dp


def test_the_usual_order_is_the_first_and_sites_stay_outermost() -> None:
    assert [order.text for order in orders(Mesh.parse("tp2 dp3 pp1"))] == ["dp3 tp2", "tp2 dp3"]
    found = [order.text for order in orders(Mesh.parse("site2 tp2 dp2"))]
    assert found == ["site2 dp2 tp2", "site2 tp2 dp2"]
