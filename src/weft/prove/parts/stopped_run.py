"""A run that is stopped while it trains, and what is left of it: checkpoints, snapshots in memory; ranks that go on with it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weft.checkpoint.folder import FOLDER
from weft.checkpoint.resume import AUTO
from weft.comm.comm import Comm
from weft.prove.parts.continuation import Continuation, Store
from weft.prove.record import RankRecord
from weft.prove.subject import Subject
from weft.prove.trained_part import TrainedPart
from weft.run.rank_status import StatusBoard
from weft.run.run_ranks import run_ranks
from weft.run.world import Attempt, Restart

TIMEOUT_S = 3600.0
RUN, MEMORY, NODES = "run", "memory", "nodes"
"""Folders of the stopped run: its run folder, the snapshots of one launcher, and those of each node."""
LOST_NODE = 0
"""Rank whose node is lost; every rank has a node of its own."""

PartOf = Callable[[int, Attempt], TrainedPart]
"""From a rank, and an attempt without snapshots, to what it trains."""


@dataclass(frozen=True)
class StoppedRun:
    """A run that stops after some steps.

    Attributes:
        subject: the run.
        folder: an empty folder for all its files.
        num_stored: steps after which it is saved; one more is trained and lost, where the next save
            is later than that.
    """

    subject: Subject
    folder: Path
    num_stored: int

    def train(self, records: Sequence[RankRecord], *, has_nodes: bool) -> None:
        """Train until the stop, once with one launcher, and once on several nodes.

        Args:
            records: of the ranks.
            has_nodes: whether there is a second training, on several nodes.
        """
        saved = self.subject.with_values(
            {"save.every": self.num_stored, "save.memory_every": self.num_stored}
        )
        (self.folder / MEMORY).mkdir()
        train_part(saved, records, part_of=self._of_launcher)
        if has_nodes:
            others = fresh_records(self.subject)
            train_part(saved, others, part_of=self._of_nodes)

    def go_on(self, subject: Subject, how: Continuation, *, records: Sequence[RankRecord]) -> None:
        """Train the remaining steps, from copies of what the stopped run has left.

        Args:
            subject: the run on the layout of the continuation.
            records: of its ranks.
        """
        # A continuation saves into its folder, from which the next one would go on.
        copied = self.folder / f"continued-{sum(1 for _ in self.folder.iterdir())}"
        # Ranks that do not find their snapshot are not to go on from a checkpoint unseen.
        leaves_out = () if how.store == "checkpoint" else (FOLDER,)
        shutil.copytree(self.folder / RUN, copied / RUN, ignore=shutil.ignore_patterns(*leaves_out))
        make_part = self._parts[how.store](copied)
        train_part(subject, records, part_of=make_part)

    # what ranks train until the stop

    @property
    def _total(self) -> int:
        """The last step before the stop; its update changes what an earlier save has copied."""
        return self.num_stored + (1 if self.num_stored > 1 else 0)

    def _of_launcher(self, rank: int, attempt: Attempt) -> TrainedPart:
        del rank
        attempt = replace(attempt, memory_folder=self.folder / MEMORY)
        return TrainedPart(str(self.folder / RUN), self._total, attempt=attempt)

    def _of_nodes(self, rank: int, attempt: Attempt) -> TrainedPart:
        attempt = _on_node(attempt, rank, self.folder / NODES)
        return TrainedPart(str(self.folder / "run-on-nodes"), self._total, attempt=attempt)

    # what ranks train after it

    @property
    def _parts(self) -> Mapping[Store, Callable[[Path], PartOf]]:
        """Store -> from a folder for copies to what a rank trains."""
        return {
            "checkpoint": self._from_checkpoint,
            "memory": self._from_memory,
            "nodes": self._from_nodes,
        }

    def _from_checkpoint(self, copied: Path) -> PartOf:
        part = TrainedPart(str(copied / RUN), self.subject.steps, resume=AUTO)
        return lambda rank, attempt: part

    def _from_memory(self, copied: Path) -> PartOf:
        """Ranks that are started again by their launcher."""
        memory = copied / MEMORY
        shutil.copytree(self.folder / MEMORY, memory)
        restart = _restart(LOST_NODE)

        def part(rank: int, attempt: Attempt) -> TrainedPart:
            del rank
            attempt = replace(attempt, memory_folder=memory, restart=restart)
            return TrainedPart(str(copied / RUN), self.subject.steps, attempt=attempt)

        return part

    def _from_nodes(self, copied: Path) -> PartOf:
        """Ranks that are started again on several nodes, one of which is new."""
        nodes = copied / NODES
        shutil.copytree(self.folder / NODES, nodes)
        # What is left of its snapshot is a copy on another node.
        shutil.rmtree(nodes / str(LOST_NODE))

        def part(rank: int, attempt: Attempt) -> TrainedPart:
            attempt = replace(_on_node(attempt, rank, nodes), num_restarts=1)
            total = self.subject.steps
            return TrainedPart(str(copied / RUN), total, resume=AUTO, attempt=attempt)

        return part


def _on_node(attempt: Attempt, rank: int, nodes: Path) -> Attempt:
    """The attempt of a rank that is alone on its node."""
    folder = nodes / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    return replace(attempt, memory_folder=folder, node=f"node{rank}")


def train_whole(subject: Subject, records: Sequence[RankRecord], *, out: Path) -> None:
    """Train all steps on the layout without a stop."""
    train_part(subject, records, part_of=lambda rank, attempt: TrainedPart(str(out), subject.steps))


def fresh_records(subject: Subject) -> list[RankRecord]:
    """Empty records of all ranks."""
    return [RankRecord(rank) for rank in range(subject.mesh.size)]


def train_part(subject: Subject, records: Sequence[RankRecord], *, part_of: PartOf) -> None:
    """Train one part on all ranks; each adds to its record."""
    board = StatusBoard.in_memory(subject.mesh.size)

    def rank(comm: Comm) -> None:
        record = records[comm.rank]
        part = part_of(comm.rank, Attempt(board.rank(comm.rank)))
        try:
            part.train(subject, comm, record=record)
        except Exception as error:
            record.error = error
            raise

    run_ranks(subject.mesh, rank, timeout_s=TIMEOUT_S, takes_turns=True)


def _restart(rank: int) -> Restart:
    """The first restart, after this rank was killed."""
    return Restart(
        number=1,
        most=1,
        rank=rank,
        reason="was killed",
        detected_s=0.0,
        at_s=time.monotonic(),
        had_started=True,
    )
