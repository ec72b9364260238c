"""Costs of orders of a mesh's axes on nodes: against runs measured with that order, and by hand."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from tests.planner.test_step_costs import run_of
from weft.cli import main
from weft.config.hardware import Hardware, find_hardware
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.core.mesh import WIDTH, Mesh
from weft.core.node_placement import NodePlacement, orders
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import RoleCosts, measure
from weft.planner.simulate.order_costs import MeshOrder, crossing_shares, mesh_order, placed
from weft.planner.simulate.placed_steps import PlacedSteps
from weft.planner.simulate.predict import predict_measured
from weft.planner.simulate.speeds import Speeds

NODE_OF_4 = replace(find_hardware("h100"), node=4)
SLOW_NETWORK = replace(NODE_OF_4, network_gb_s=NODE_OF_4.network_gb_s / 1000)
"""Links decide: models of tests are small."""


def roles_of(mesh: str, words: str = "") -> tuple[RoleCosts, ...]:
    run = run_of(f"--mesh {mesh.replace(' ', ',')} --batch.global_size 16 {words}")
    return measure(MeasuredRun.of(run))


def order_of(mesh: str, placement: NodePlacement, hardware: Hardware = SLOW_NETWORK) -> MeshOrder:
    found = mesh_order(roles_of(mesh), hardware, placement)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("words", "order"),
    [
        ("tp2 pp2 dp2", "pp2 dp2 tp2"),
        ("pp2 dp2 tp2", "dp2 tp2 pp2"),
        ("tp2 dp4", "dp4 tp2"),
        ("cp2 dp2 tp2", "tp2 cp2 dp2"),
    ],
)
def test_another_order_costs_what_a_run_with_that_order_does(words: str, order: str) -> None:
    """One run is measured; the other is priced from it, apart from sums over the whole world."""
    here = NodePlacement.even(8, 4)
    steps = PlacedSteps(roles_of(words), SLOW_NETWORK)
    priced = steps.slowest(placed(here, Mesh.parse(words), Mesh.parse(order)))
    direct = predict_measured(roles_of(order), Speeds(SLOW_NETWORK)).step
    assert priced.step.pipeline_s == pytest.approx(direct.pipeline_s, rel=1e-9)
    assert priced.total_s == pytest.approx(direct.total_s, rel=1e-3)


def test_a_tensor_axis_across_nodes_is_named_with_its_bytes_and_the_better_order() -> None:
    found = order_of("tp2 dp4", NodePlacement.even(8, 4))
    assert found.given.nodes == {"tp": 2, "dp": 1}
    assert found.best.nodes == {"tp": 1, "dp": 2}
    assert found.factor > 1.05
    sent = sum(
        total.sent_bytes
        for (axis, _), total in roles_of("tp2 dp4")[0].traffic.items()
        if axis == "tp"
    )
    assert found.given.crossing_bytes == {"tp": 8 * sent, "dp": 0}
    assert found.note.startswith(f"mesh order: a step takes {found.factor:.3g} times as long (pred")
    assert "tp2 is on 2 nodes and sends " in found.note
    assert found.note.endswith('--mesh "dp4 tp2" keeps it inside')
    assert "\n" not in found.note


def test_messages_of_the_pipeline_cross_nodes_where_its_ranks_do() -> None:
    roles = roles_of("pp2 dp4")
    sent = sum(role.num_ranks * role.traffic["pp", "send"].sent_bytes for role in roles)
    found = mesh_order(roles, SLOW_NETWORK, NodePlacement.even(8, 4))
    assert found is not None
    assert found.given.crossing_bytes == {"dp": 0, "pp": sent}
    turned = mesh_order(roles, SLOW_NETWORK, NodePlacement.in_turn((4, 4)))
    assert turned is not None
    assert turned.given.crossing_bytes["pp"] == 0


def test_a_ring_leaves_each_node_once_and_an_all_to_all_for_each_member_elsewhere() -> None:
    nodes = np.array([[0, 0, 1, 1], [0, 1, 1, 1], [2, 2, 2, 2], [0, 1, 2, 3]])
    assert crossing_shares("all_reduce", nodes, NODE_OF_4).tolist() == [0.5, 0.5, 0.0, 1.0]
    assert crossing_shares("all_to_all", nodes, NODE_OF_4).tolist() == [2 / 3, 1.0, 0.0, 1.0]
    assert crossing_shares("send", nodes[:, 1:3], NODE_OF_4).tolist() == [1.0, 0.0, 0.0, 1.0]
    of_cpus = replace(NODE_OF_4, device="cpu")
    even = np.array([[0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 2, 3]])
    assert crossing_shares("all_reduce", even, of_cpus).tolist() == [1 / 3, 0.0, 1.0]


def test_a_right_order_has_no_note() -> None:
    found = order_of("dp4 tp2", NodePlacement.even(8, 4))
    assert (found.note, found.factor) == ("", 1.0)
    assert found.given == found.best


def test_where_nodes_take_ranks_in_turn_the_order_turns_around() -> None:
    found = order_of("dp4 tp2", NodePlacement.in_turn((4, 4)))
    assert found.best.mesh == "tp2 dp4"
    assert found.note.endswith("so does this order where ranks fill one node after the other")
    assert order_of("tp2 dp4", NodePlacement.in_turn((4, 4))).note == ""


def test_on_uneven_nodes_the_slowest_ranks_count() -> None:
    """Ranks 4 and 5 are on different nodes: the first tp group is not, and waits for theirs."""
    roles = roles_of("dp4 tp2")
    uneven = NodePlacement.by_node((5, 3))
    slow = PlacedSteps(roles, SLOW_NETWORK).slowest(uneven).total_s
    even = PlacedSteps(roles, SLOW_NETWORK).slowest(NodePlacement.even(8, 4)).total_s
    assert slow > 1.05 * even
    assert predict_measured(roles, Speeds(SLOW_NETWORK, uneven)).step.total_s == slow
    found = mesh_order(roles, SLOW_NETWORK, uneven)
    assert found is not None
    assert found.given.nodes["tp"] == 2


def test_a_ring_waits_for_the_rank_that_sends_to_another_node() -> None:
    """The measured rank 0 sends to rank 1 of its own node, rank 3 to rank 4 of the other one."""
    roles = roles_of("cp8", "--data.seq_len 64")
    inside = predict_measured(roles, Speeds(replace(SLOW_NETWORK, node=8))).step.pipeline_s
    across = predict_measured(roles, Speeds(SLOW_NETWORK)).step.pipeline_s
    assert across > 1.5 * inside


def test_on_one_node_or_links_of_unknown_speed_nothing_is_said() -> None:
    roles = roles_of("tp2 dp4")
    assert mesh_order(roles, SLOW_NETWORK, NodePlacement.even(8, 8)) is None
    assert mesh_order(roles, replace(NODE_OF_4, network_gb_s=0.0), NodePlacement.even(8, 4)) is None
    alone = replace(NODE_OF_4, link_gb_s=0.0)
    assert mesh_order(roles, alone, NodePlacement.even(8, 4)) is None
    assert mesh_order(roles, alone, NodePlacement.even(8, 1)) is not None


@pytest.mark.parametrize("mesh", ["pp2 dp2 cp2 tp2", "dp2 fsdp2 cp2 tp2", "site2 pp2 dp2 tp2"])
def test_every_order_is_legal(mesh: str) -> None:
    run = run_of(f"--mesh {mesh.replace(' ', ',')} --batch.global_size 16 --parallel.zero 1")
    for order in orders(Mesh.parse(mesh)):
        assert not run_checks(run.with_values({"mesh": order.text}), config_checks), order


def test_explain_says_what_a_bad_order_costs(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model.preset llama3-8b --model.layers 2 --data.seq_len 4096 --batch.micro_size 1"
    words += " --batch.global_size 64 --precision.compute bfloat16 --hardware h100"
    assert main(["explain", *words.split(), "--mesh", "tp2 dp8"]) == 0
    text = capsys.readouterr().out
    assert '--mesh "dp8 tp2" keeps it inside' in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= WIDTH
    assert main(["explain", *words.split(), "--mesh", "tp2 dp8", "--json"]) == 0
    order = json.loads(capsys.readouterr().out)["mesh_order"]
    assert order["given"]["nodes"] == {"tp": 2, "dp": 1}
    assert order["best"]["mesh"] == "dp8 tp2"
    assert main(["explain", *words.split(), "--mesh", "dp8 tp2"]) == 0
    assert "mesh order" not in capsys.readouterr().out


def test_all_permutations_are_tried() -> None:
    """The best order is the least of all of them, each measured for itself."""
    mesh = "tp2 pp2 dp2"
    found = order_of(mesh, NodePlacement.even(8, 4))
    seconds = {
        order: predict_measured(roles_of(" ".join(order)), Speeds(SLOW_NETWORK)).step.total_s
        for order in itertools.permutations(mesh.split())
    }
    assert found.best.step_s == pytest.approx(min(seconds.values()), rel=0.01)
