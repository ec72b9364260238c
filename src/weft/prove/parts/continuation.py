"""How a stopped run goes on: from a checkpoint or a snapshot in memory, on its own layout or on another. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Store = Literal["checkpoint", "memory", "nodes"]
STORES = {
    "checkpoint": "a checkpoint",
    "memory": "a snapshot in memory",
    "nodes": "snapshots of other nodes, one of which is lost",
}


@dataclass(frozen=True)
class Continuation:
    """A start of ranks that go on with a stopped run.

    Attributes:
        store: where they read its state: "checkpoint" as `weft train --resume auto`, "memory" as
            ranks that are started again after one was killed, "nodes" as those of several nodes
            after one of these was lost.
        mesh: on which they train.
    """

    store: Store
    mesh: str

    def __str__(self) -> str:
        return f"from {STORES[self.store]} on {self.mesh or 'one rank'}"


def continuations(
    own: str, *, num_ranks: int, others: Iterable[str], elastic: str | None
) -> tuple[Continuation, ...]:
    """The continuations that a proof compares, those on the own layout first.

    Args:
        own: mesh of the run.
        num_ranks: of the run.
        others: meshes that read its checkpoint.
        elastic: mesh of fewer ranks, which reads its snapshot; None: there is none.
    """
    found = [Continuation("checkpoint", own), Continuation("memory", own)]
    if num_ranks > 1:
        found.append(Continuation("nodes", own))
    if elastic is not None:
        found.append(Continuation("memory", elastic))
    found.extend(Continuation("checkpoint", mesh) for mesh in others)
    return tuple(found)
