"""The placement of ranks on nodes, read from the variables of torchrun, Ray or Slurm. Imports no torch.

Slurm counts the tasks of each node (`SLURM_TASKS_PER_NODE`) and lists those of the own one
(`SLURM_GTIDS`), from which follows in which of its ways it has distributed them.
"""

from __future__ import annotations

import re

from weft.core.node_placement import NodePlacement
from weft.run.world import Env, World

TASKS_WORD = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def placement_of(env: Env, world: World) -> NodePlacement | None:
    """Where the ranks of a world are; None where the variables do not say, or contradict it."""
    if "RANK" in env:
        return _of_torchrun(env, world)
    return _of_slurm(env, world)


def _of_torchrun(env: Env, world: World) -> NodePlacement | None:
    """Every node has as many ranks as this one, in order; of nodes with different numbers the others'
    are not known.
    """
    if not env.get("LOCAL_WORLD_SIZE"):
        return None
    num_nodes, rest = divmod(world.size, world.local_size)
    is_even = rest == 0 and env.get("GROUP_WORLD_SIZE", str(num_nodes)) == str(num_nodes)
    if not is_even or world.rank % world.local_size != world.local_rank:
        return None
    return NodePlacement.even(world.size, world.local_size)


def _of_slurm(env: Env, world: World) -> NodePlacement | None:
    """The first distribution whose tasks on this node are those that Slurm lists."""
    counts = tasks_of_nodes(
        env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    )
    own = env.get("SLURM_GTIDS", "").split(",")
    node = env.get("SLURM_NODEID", "")
    if sum(counts) != world.size or not all(map(str.isdecimal, (node, *own))):
        return None
    own_ranks = tuple(sorted(map(int, own)))
    # the numbers of tasks are the same for all distributions; those of the own node tell them apart
    planes = (NodePlacement.in_turn(counts, block=block) for block in range(1, max(counts)))
    for placement in (NodePlacement.by_node(counts), *planes):
        if placement.ranks_of(int(node)) == own_ranks:
            return placement
    return None


def tasks_of_nodes(text: str) -> tuple[int, ...]:
    """The tasks of every node as Slurm writes them; () where the text is no such list.

    >>> tasks_of_nodes("4(x2),1")
    (4, 4, 1)
    """
    counts: list[int] = []
    for word in text.split(","):
        match = TASKS_WORD.fullmatch(word)
        if match is None:
            return ()
        counts.extend([int(match[1])] * int(match[2] or 1))
    return tuple(counts)
