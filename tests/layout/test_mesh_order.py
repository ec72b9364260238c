"""Whether the axes that send most cross nodes, by the rule that needs no measurement."""

from __future__ import annotations

import pytest

from weft.core.mesh import Mesh
from weft.core.node_placement import NodePlacement
from weft.layout.mesh_order import order_problem

IN_TURN = NodePlacement.in_turn((4, 4))


@pytest.mark.parametrize(
    ("layout", "placement", "named"),
    [
        ("tp2 dp8", NodePlacement.even(16, 8), ("tp2", "dp8", "dp8 tp2")),
        ("tp2 pp2 dp2", NodePlacement.even(8, 4), ("tp2", "dp2", "pp2 dp2 tp2")),
        ("cp2 dp2 tp2", NodePlacement.even(8, 4), ("cp2", "dp2", "dp2 cp2 tp2")),
        ("dp4 tp2", IN_TURN, ("tp2", "dp4", "tp2 dp4")),
        ("tp2 dp4", IN_TURN, ()),
        ("dp8 tp2", NodePlacement.even(16, 8), ()),
        ("dp4 tp2", NodePlacement.by_node((6, 2)), ()),
        ("dp2 pp2 tp2", NodePlacement.even(8, 4), ()),  # dp reduces once a step
        ("tp16", NodePlacement.even(16, 8), ()),  # no other order keeps it on a node
        ("tp2 dp2", NodePlacement.even(4, 4), ()),  # one node
    ],
)
def test_axes_in_a_bad_order_are_named_with_a_better_one(
    layout: str, placement: NodePlacement, named: tuple[str, ...]
) -> None:
    problem = order_problem(Mesh.parse(layout), placement)
    if not named:
        assert problem == ""
        return
    crossing, inside, better = named
    assert problem.startswith(f"mesh order: {crossing} is on 2 nodes")
    assert f"and {inside}, which sends less, is on one" in problem
    assert f'--mesh "{better}"' in problem
    assert order_problem(Mesh.parse(better), placement) == ""
