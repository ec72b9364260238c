"""Which files of each snapshot the nodes hold in memory, and the newest snapshot of which all files are left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

NO_STEP = -1
"""No snapshot."""


@dataclass(frozen=True)
class Pieces:
    """The files of one snapshot on one node.

    Attributes:
        ranks: number of ranks that wrote the snapshot.
        held: ranks whose files are on this node.
        snapshot: its id, which tells it from one that another attempt wrote after the same step.
    """

    ranks: int
    held: tuple[int, ...]
    snapshot: str = ""


NodePieces = dict[int, Pieces]
"""Step -> the files of its snapshot on one node."""


def text_of(pieces: NodePieces) -> str:
    """The pieces as text for other ranks, which `pieces_in` reads."""
    by_step = {step: asdict(held_here) for step, held_here in pieces.items()}
    return json.dumps(by_step)


def pieces_in(text: str) -> NodePieces:
    """What `text_of` wrote."""
    found: NodePieces = {}
    for step, fields in json.loads(text).items():
        held = tuple(fields["held"])
        found[int(step)] = Pieces(fields["ranks"], held, fields["snapshot"])
    return found


def newest_whole(found: Sequence[NodePieces]) -> int:
    """The newest step with a snapshot of which every rank's files are on some node; NO_STEP if
    there is none.

    Args:
        found: the files on the node of every rank.
    """
    steps: set[int] = set()
    for node in found:
        steps.update(node)
    whole = [step for step in steps if first_holders(found, step)]
    return max(whole, default=NO_STEP)


def first_holders(found: Sequence[NodePieces], step: int) -> dict[int, int]:
    """For each rank that wrote a whole snapshot of a step: the first rank now whose node has its
    files; nothing if no snapshot of the step is whole.

    Args:
        found: the files on the node of every rank.
    """
    needed: dict[str, int] = {}
    holders_of: dict[str, dict[int, int]] = {}
    for rank_here, node in enumerate(found):
        if step not in node:
            continue
        pieces = node[step]
        needed[pieces.snapshot] = pieces.ranks
        holders = holders_of.setdefault(pieces.snapshot, {})
        for rank in pieces.held:
            holders.setdefault(rank, rank_here)
    # Files of two attempts after the same step are of two states: they are never put together.
    for snapshot, holders in holders_of.items():
        if len(holders) == needed[snapshot]:
            in_rank_order = sorted(holders.items())
            return dict(in_rank_order)
    return {}
