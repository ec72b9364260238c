"""Snapshots in the memory of several nodes: each holds the files of its own ranks, and copies of those of ranks on another node.

    write      every rank writes its file into the memory of its node
    exchange   it sends a copy to its holder on another node (weft.checkpoint.holders)
    publish    once all have theirs, one rank of each node renames the folder; then the older ones are removed
    assemble   after a restart: the newest snapshot of which every file is left somewhere becomes a checkpoint on every node

So the loss of one node takes one of two copies, and a death at any moment leaves a whole snapshot.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from weft.checkpoint.commit import commit, discard
from weft.checkpoint.folder import FOLDER, checkpoint_path, checkpoints, steps_of, temporary_path
from weft.checkpoint.format import Facts, data_file_name, rank_manifest_name
from weft.checkpoint.holders import HolderShift, choose_holders
from weft.checkpoint.memory import MemorySnapshots
from weft.checkpoint.pieces import (
    NO_STEP,
    NodePieces,
    Pieces,
    first_holders,
    newest_whole,
    pieces_in,
    text_of,
)
from weft.checkpoint.read import Checkpoint, open_checkpoint
from weft.checkpoint.saver import StatusFlag
from weft.checkpoint.state import TrainState, snapshot_of
from weft.checkpoint.transfer import (
    CHUNK_BYTES,
    distribute,
    distribute_file,
    file_errors,
    read_on_all_ranks,
)
from weft.checkpoint.write import RankWrite, start_write
from weft.comm.comm import Comm
from weft.comm.text import all_gather_text, raise_on_all_ranks
from weft.errors import CheckpointError, Fault

Event = dict[str, Any]

PIECES = "pieces"
"""Folder of the snapshots: PIECES/ckpt/step-000100/ with the files of some ranks."""
FACTS = "facts.json"


@dataclass(frozen=True)
class NodeMemory:
    """The memory of this rank's node.

    Attributes:
        folder: the same for the ranks of one node, and of no other.
        nodes: names of the nodes of all ranks, in rank order.
        shift: to the holders of copies; None: there are none, because all ranks are on one node, or
            because no shift leads every rank to another one.
    """

    folder: Path
    nodes: tuple[str, ...]
    shift: HolderShift | None

    @property
    def pieces(self) -> Path:
        """The folder of the snapshots."""
        return self.folder / PIECES

    @staticmethod
    def of(comm: Comm, folder: Path | None, node: str) -> NodeMemory | None:
        """The memory of the node of this rank; None on all ranks if one has no folder. Every rank
        must call it.
        """
        nodes = all_gather_text(comm, node if folder is not None else "")
        if folder is None or not all(nodes):
            return None
        shift = None
        if len(set(nodes)) > 1:
            shift = choose_holders(comm.mesh, nodes)
        return NodeMemory(folder, nodes, shift)

    @property
    def problem(self) -> str:
        """Why a lost node takes snapshots with it; "" if it does not."""
        num_nodes = len(set(self.nodes))
        if num_nodes == 1 or self.shift is not None:
            return ""
        return (
            f"no shift along the axes of the mesh leads every rank to another of {num_nodes} nodes, "
            "so snapshots have no second copy; a lost node loses them"
        )

    def is_first(self, rank: int) -> bool:
        """Whether a rank is the first one of its node."""
        return self.nodes.index(self.nodes[rank]) == rank


@dataclass(frozen=True)
class _Pending:
    """A snapshot that is being written."""

    step: int
    tmp: Path
    facts: Facts
    write: RankWrite


class NodeSaver:
    """Writes snapshots into the memory of the nodes; every rank has one and calls it at the same
    points, as those of `weft.checkpoint.saver.Saver`.
    """

    def __init__(
        self,
        comm: Comm,
        memory: NodeMemory,
        *,
        state: Callable[[], TrainState],
        facts: Callable[[int], Facts],
    ) -> None:
        self.comm = comm
        self.memory = memory
        self.write_s = 0.0
        """Processor time of this rank's newest write, and the time of its exchange."""
        self._state = state
        self._facts = facts
        self._writing: _Pending | None = None

    def status(self) -> StatusFlag:
        """This rank's status flags for the next gather."""
        if self._writing is None or self._writing.write.done():
            return StatusFlag(0)
        return StatusFlag.WRITING

    def after_step(self, step: int, status: int) -> Iterator[Event]:
        """Publish the snapshot that is being written, if all ranks have written."""
        if self._writing is not None and not status & StatusFlag.WRITING:
            yield from self.wait()

    def save(self, step: int) -> Iterator[Event]:
        """Start to write a snapshot; waits first for an earlier one."""
        yield from self.wait()
        copied = snapshot_of(self._state())
        tmp = temporary_path(checkpoint_path(self.memory.pieces, step))
        write = start_write(
            tmp,
            self.comm.rank,
            copied.items,
            digests=copied.digests,
            require_finite=True,
            before=copied.under_way.wait,
        )
        self._writing = _Pending(step, tmp, self._facts(step), write)

    def wait(self) -> Iterator[Event]:
        """Wait until no snapshot is pending; every rank must call it."""
        pending, self._writing = self._writing, None
        if pending is None:
            return
        start_s = time.monotonic()
        try:
            raise_on_all_ranks(self.comm, pending.write.wait)
            self._exchange(pending)
            self._publish(pending)
        except CheckpointError as error:
            # Until all ranks are here, another one of this node may still write into the folder.
            self.comm.barrier_world()
            discard(pending.tmp)
            reason = "; ".join(str(fault) for fault in error.faults)
            yield {"event": "save_failed", "step": pending.step, "why": reason}
        self.write_s = pending.write.cpu_s + time.monotonic() - start_s

    def close(self) -> None:
        """What is being written is left to its thread."""

    def _exchange(self, pending: _Pending) -> None:
        """Send this rank's files to its holder, and receive those that it holds."""
        shift = self.memory.shift
        if shift is None:
            return
        for make_name in (data_file_name, rank_manifest_name):
            _shift_file(self.comm, shift, pending.tmp, make_name)

    def _publish(self, pending: _Pending) -> None:
        is_first = self.memory.is_first(self.comm.rank)
        final = checkpoint_path(self.memory.pieces, pending.step)
        # An id for this attempt: after a restart the same step is written again, with other ranks perhaps.
        snapshot = all_gather_text(self.comm, uuid.uuid4().hex)[0]

        def rename() -> None:
            if is_first:
                facts = {
                    "facts": pending.facts.model_dump(),
                    "ranks": self.comm.mesh.size,
                    "snapshot": snapshot,
                }
                with file_errors(final):
                    (pending.tmp / FACTS).write_text(json.dumps(facts))
                    pending.tmp.rename(final)

        raise_on_all_ranks(self.comm, rename)  # after it, every node has this one
        if is_first:
            # Only now: a death before leaves the older one whole on all nodes.
            remove_pieces(self.memory, below=pending.step)
            shutil.rmtree(self.memory.folder / FOLDER, ignore_errors=True)


def snapshots_on_nodes(
    comm: Comm,
    memory: NodeMemory,
    *,
    state: Callable[[], TrainState],
    facts: Callable[[int], Facts],
    every: int,
) -> MemorySnapshots:
    """Snapshots in the memory of all nodes."""

    def remove_above(step: int) -> None:
        if memory.is_first(comm.rank):
            remove_pieces(memory, above=step)

    saver = NodeSaver(comm, memory, state=state, facts=facts)
    return MemorySnapshots(comm, saver, remove_above=remove_above, every=every)


def _shift_file(
    comm: Comm, shift: HolderShift, folder: Path, make_name: Callable[[int], str]
) -> None:
    """Send a file of this rank along the shift, chunk by chunk, and write the one that arrives."""
    group = comm.group(shift.axis)
    place = group.index(comm.rank)
    degree = len(group)
    source = group[(place - shift.shift) % degree]
    own = folder / make_name(comm.rank)
    held = folder / make_name(source)
    lengths: list[int] = []

    def measure() -> None:
        with file_errors(own):
            lengths.append(own.stat().st_size)

    raise_on_all_ranks(comm, measure)
    sizes = [int(text) for text in all_gather_text(comm, str(lengths[0]))]
    for start in range(0, max(sizes), CHUNK_BYTES):
        sent = max(0, min(CHUNK_BYTES, sizes[comm.rank] - start))
        received = max(0, min(CHUNK_BYTES, sizes[source] - start))
        send_sizes = [0] * degree
        recv_sizes = [0] * degree
        send_sizes[(place + shift.shift) % degree] = sent
        recv_sizes[(place - shift.shift) % degree] = received
        chunk = read_on_all_ranks(comm, own, start, sent).to(comm.device)
        arrived = comm.all_to_all(chunk, shift.axis, send_sizes=send_sizes, recv_sizes=recv_sizes)
        raise_on_all_ranks(comm, partial(_append, held, start, arrived.cpu()))


def _append(path: Path, start: int, chunk: Tensor) -> None:
    with file_errors(path), path.open("xb" if start == 0 else "ab") as file:
        file.write(chunk.numpy().data)


def remove_pieces(memory: NodeMemory, *, below: int = 0, above: int | None = None) -> None:
    """Remove the snapshots of fewer than `below`, or more than `above` steps, on this node."""
    for number, path in tuple(checkpoints(memory.pieces)):
        if number < below or (above is not None and number > above):
            shutil.rmtree(path, ignore_errors=True)


def clean_node(comm: Comm, memory: NodeMemory, *, above: int) -> None:
    """Remove what earlier attempts have partly written, and the snapshots of more than `above`
    steps, which are trained again; every rank must call it.
    """
    if memory.is_first(comm.rank):
        folder = memory.pieces / FOLDER
        with suppress(OSError):
            for name in os.listdir(folder):
                if not steps_of([name]):
                    shutil.rmtree(folder / name, ignore_errors=True)
        remove_pieces(memory, above=above)
        for number, path in tuple(checkpoints(memory.folder)):
            if number > above:
                shutil.rmtree(path, ignore_errors=True)
    comm.barrier_world()


def assemble(
    comm: Comm, memory: NodeMemory, *, above: int, expects_one: bool = False
) -> Checkpoint | None:
    """The newest whole snapshot of more than `above` steps, opened as a checkpoint in the memory of
    every node; None if there is none. Every rank must call it.

    Args:
        expects_one: whether no snapshot at all, of any step, is an error.

    Raises:
        CheckpointError: on all ranks, if it is damaged, or there is no room.
    """
    newest_here = next(checkpoints(memory.folder), (NO_STEP,))[0]
    assembled = [int(text) for text in all_gather_text(comm, str(newest_here))]
    pieces_here = _pieces_here(memory) if memory.is_first(comm.rank) else {}
    texts = all_gather_text(comm, text_of(pieces_here))
    found = [pieces_in(text) for text in texts]
    in_pieces = newest_whole(found)
    step = max(in_pieces, *assembled)
    if step == NO_STEP and expects_one:
        what = "no whole snapshot is left in the memory of these nodes"
        raise CheckpointError(Fault("save.memory_every", what))
    if step <= above:
        return None
    path = checkpoint_path(memory.folder, step)
    if step in assembled:  # by an earlier attempt; a node may have been lost since
        distribute(comm, path, root=assembled.index(step))
    else:
        _assemble_pieces(comm, memory, path, holders=first_holders(found, step))
    opened: list[Checkpoint] = []

    def verify() -> None:
        checkpoint = open_checkpoint(path)
        checkpoint.verify(comm.rank, comm.mesh.size)
        opened.append(checkpoint)

    raise_on_all_ranks(comm, verify)
    return opened[0]


def _assemble_pieces(
    comm: Comm, memory: NodeMemory, final: Path, *, holders: dict[int, int]
) -> None:
    """Send the files of a snapshot to every node, and commit them there.

    Args:
        holders: rank that wrote a file -> a rank whose node has it.
    """
    is_first = memory.is_first(comm.rank)
    tmp = temporary_path(final)
    pieces = memory.pieces / FOLDER / final.name
    some_holder = holders[0]
    facts_here = _read_facts(pieces) if comm.rank == some_holder else ""
    stored = all_gather_text(comm, facts_here)[some_holder]

    def make_folder() -> None:
        if is_first:
            with file_errors(tmp):
                shutil.rmtree(final.parent, ignore_errors=True)
                tmp.mkdir(parents=True)

    raise_on_all_ranks(comm, make_folder)
    for rank, holder in holders.items():
        for name in (data_file_name(rank), rank_manifest_name(rank)):
            target = tmp / name if is_first else None
            distribute_file(comm, pieces / name, target, root=holder)

    def commit_files() -> None:
        if is_first:
            facts = Facts.model_validate(json.loads(stored)["facts"])
            commit(tmp, final, facts, ranks=len(holders))

    raise_on_all_ranks(comm, commit_files)


def _pieces_here(memory: NodeMemory) -> NodePieces:
    """The snapshots of this node, by step; those without an id cannot be told apart and do not count."""
    found: NodePieces = {}
    for step, path in checkpoints(memory.pieces):
        text = _read_facts(path)
        if not text:
            continue
        stored = json.loads(text)
        if "snapshot" not in stored:  # of a version whose snapshots had no ids
            continue
        num_ranks = stored["ranks"]
        names = set(os.listdir(path))
        held: list[int] = [
            rank
            for rank in range(num_ranks)
            if {data_file_name(rank), rank_manifest_name(rank)} <= names
        ]
        found[step] = Pieces(num_ranks, tuple(held), stored["snapshot"])
    return found


def _read_facts(pieces: Path) -> str:
    try:
        return (pieces / FACTS).read_text(encoding="utf-8")
    except OSError:
        return ""
