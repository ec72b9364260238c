"""The placement of ranks from the variables of torchrun, Ray and Slurm; contradictions."""

from __future__ import annotations

import pytest

from weft.core.node_placement import NodePlacement
from weft.run.launcher_nodes import placement_of, tasks_of_nodes
from weft.run.world import detect

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "node[07-08]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
}


def found(env: dict[str, str]) -> NodePlacement | None:
    world = detect(env)
    assert world is not None
    return placement_of(env, world)


def test_torchrun_fills_one_node_after_the_other() -> None:
    assert found(TORCHRUN) == NodePlacement.even(8, 4)
    ray = {name: value for name, value in TORCHRUN.items() if not name.startswith("GROUP")}
    assert found(ray) == NodePlacement.even(8, 4)


@pytest.mark.parametrize(
    "changed",
    [
        {"GROUP_WORLD_SIZE": "3"},  # nodes of 4, 3 and 1 ranks
        {"LOCAL_WORLD_SIZE": "3"},  # 8 ranks are no multiple of it
        {"LOCAL_WORLD_SIZE": ""},  # set by hand
        {"LOCAL_RANK": "2"},
    ],
)
def test_what_torchrun_does_not_say_is_not_known(changed: dict[str, str]) -> None:
    assert found(TORCHRUN | changed) is None


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"SLURM_GTIDS": "0,1,2,3"}, NodePlacement.by_node((4, 4))),
        ({"SLURM_GTIDS": "0,2,4,6"}, NodePlacement.in_turn((4, 4))),
        ({"SLURM_GTIDS": "0,1,4,5"}, NodePlacement.in_turn((4, 4), block=2)),
        ({"SLURM_GTIDS": "1,3,5,7", "SLURM_NODEID": "1"}, NodePlacement.in_turn((4, 4))),
        (
            {"SLURM_GTIDS": "0,1,2,3,4,5", "SLURM_STEP_TASKS_PER_NODE": "6,2"},
            NodePlacement.by_node((6, 2)),
        ),
        ({"SLURM_GTIDS": "0,3,5,7"}, None),  # an arbitrary distribution
        ({"SLURM_GTIDS": "0,1,2,3", "SLURM_TASKS_PER_NODE": "4(x3)"}, None),
        ({}, None),
    ],
)
def test_slurms_distribution_follows_from_the_tasks_of_a_node(
    changed: dict[str, str], expected: NodePlacement | None
) -> None:
    assert found(SLURM | changed) == expected


@pytest.mark.parametrize(
    ("text", "expected"), [("4(x2),1", (4, 4, 1)), ("8", (8,)), ("", ()), ("4(y2)", ())]
)
def test_tasks_of_nodes(text: str, expected: tuple[int, ...]) -> None:
    assert tasks_of_nodes(text) == expected
