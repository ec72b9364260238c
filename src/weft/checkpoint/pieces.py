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
    """

    ranks: int
    held: tuple[int, ...]


NodePieces = dict[int, Pieces]
"""Step -> the files of its snapshot on one node."""


def text_of(pieces: NodePieces) -> str:
    """As text for other ranks; see `pieces_in`."""
    by_step = {step: asdict(held_here) for step, held_here in pieces.items()}
    return json.dumps(by_step)


def pieces_in(text: str) -> NodePieces:
    """What `text_of` wrote."""
    found: NodePieces = {}
    for step, fields in json.loads(text).items():
        held = tuple(fields["held"])
        found[int(step)] = Pieces(fields["ranks"], held)
    return found


def newest_whole(found: Sequence[NodePieces]) -> int:
    """The newest step of which every rank's files are on some node; NO_STEP if there is none.

    Args:
        found: the files on the node of every rank.
    """
    held: dict[int, set[int]] = {}
    needed: dict[int, int] = {}
    for node in found:
        for step, pieces in node.items():
            held.setdefault(step, set())
            held[step].update(pieces.held)
            needed[step] = pieces.ranks
    whole = [step for step, ranks in held.items() if len(ranks) == needed[step]]
    return max(whole, default=NO_STEP)


def first_holders(found: Sequence[NodePieces], step: int) -> dict[int, int]:
    """For each rank that wrote the snapshot of a step: the first rank now whose node has its files.

    Args:
        found: the files on the node of every rank.
    """
    holders: dict[int, int] = {}
    for rank_here, node in enumerate(found):
        if step in node:
            for rank in node[step].held:
                holders.setdefault(rank, rank_here)
    in_rank_order = sorted(holders.items())
    return dict(in_rank_order)
