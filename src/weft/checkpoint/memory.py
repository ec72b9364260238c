"""Snapshots in memory: checkpoints in a tmpfs folder of the launcher, from which ranks that are started again resume.

The format, the writer and the commit are those of checkpoints on disk (`weft.checkpoint.saver`): a
snapshot is complete once its folder is renamed, and the one before is removed after that, so a death
at any moment leaves a valid one. The folder survives all ranks; the launcher removes it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.checkpoint.folder import checkpoints, remove_leftovers
from weft.checkpoint.format import Facts
from weft.checkpoint.saver import Saver, StatusFlag
from weft.checkpoint.state import TrainState, write_items
from weft.comm.comm import Comm
from weft.core.machine_memory import available_bytes

Event = dict[str, Any]

COPIES = 3
"""Of the state, in memory while a snapshot is written: the copy that is written, the new snapshot,
and the one before."""
MAX_SHARE = 0.5
"""Of the available memory, which the copies may take."""
MAX_COST = 0.02
"""Share of the time that automatic snapshots may take."""
MIN_INTERVAL_S = 10.0
"""Between automatic snapshots; a run that is shorter has none."""
FLAG_SHIFT = 4
"""Place of the flags of a snapshot in a rank's status, beside those of a save."""
DUE = StatusFlag.STATE_CHANGED << FLAG_SHIFT
"""Status flag of rank 0: a snapshot follows this step. The saver of snapshots has no status in this place,
which is the last one that every step sends.
"""


def room_problem(comm: Comm, folder: Path, state: TrainState) -> str:
    """Why there is no room for snapshots, or ""; the same on all ranks, which all call it."""
    own_bytes = sum(item.num_bytes for item in write_items(state))
    free_in_folder = shutil.disk_usage(folder).free
    own_free = min(free_in_folder, available_bytes())
    every_axis = tuple(name for name, _ in comm.mesh.axes)
    sizes = torch.tensor([own_bytes], dtype=torch.int64, device=comm.device)
    free = torch.tensor([own_free], dtype=torch.int64, device=comm.device)
    total = comm.all_reduce(sizes, every_axis)
    lowest = comm.all_reduce(free, every_axis, op="min")
    need_bytes = COPIES * int(total.item())
    free_bytes = int(lowest.item())
    if need_bytes <= MAX_SHARE * free_bytes:
        return ""
    return f"{need_bytes:,} bytes are needed, and {free_bytes:,} bytes of memory are available"


class SnapshotSaver(Protocol):
    """Writes snapshots; every rank has one and calls it at the same points."""

    @property
    def write_s(self) -> float: ...
    def status(self) -> StatusFlag: ...
    def after_step(self, step: int, status: int) -> Iterator[Event]: ...
    def save(self, step: int) -> Iterator[Event]: ...
    def wait(self) -> Iterator[Event]: ...
    def close(self) -> None: ...


class MemorySnapshots:
    """Takes snapshots of a training state; every rank has one and calls it at the same points.

    Args:
        remove_above: removes the snapshots of more steps than its argument, on this machine.
        every: steps between snapshots; None: as often as MAX_COST allows, decided by rank 0.
    """

    def __init__(
        self,
        comm: Comm,
        saver: SnapshotSaver,
        *,
        remove_above: Callable[[int], None],
        every: int | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self.comm = comm
        self.every = every
        self.remove_above = remove_above
        """After a rollback, when the steps of those snapshots are trained again."""
        self.cost_s = 0.0
        """Of the newest snapshot on this rank: the time that training waited, and that of the
        writing thread."""
        self._now_s = now_s
        self._last_s = now_s()
        self._saver = saver

    def status(self) -> int:
        """This rank's flags for the next gather."""
        flags = int(self._saver.status()) << FLAG_SHIFT
        if self.comm.rank == 0 and self._has_interval_passed():
            flags |= DUE
        return flags

    def after_step(self, step: int, status: int) -> Iterator[Event]:
        """Continue or start a snapshot after step `step`, in which some rank had each flag of
        `status`; yields a note where one failed.
        """
        own_status = status >> FLAG_SHIFT
        events = self._saver.after_step(step, own_status)
        yield from self._notes(events)
        if self.is_due(step, status):
            yield from self._take(step)

    def is_due(self, step: int, status: int) -> bool:
        """Whether a snapshot follows step `step`, in which some rank had each flag of `status`."""
        own_status = status >> FLAG_SHIFT
        # Some rank still writes the one before; training does not wait for it.
        if own_status & StatusFlag.WRITING:
            return False
        if self.every is None:
            return bool(status & DUE)
        return step % self.every == 0

    def wait(self) -> Iterator[Event]:
        """Wait until no snapshot is pending."""
        yield from self._notes(self._saver.wait())

    def close(self) -> None:
        """Take no further snapshot; what is being written is left to its thread."""
        self._saver.close()

    def _has_interval_passed(self) -> bool:
        if self.every is not None:
            return False
        interval_s = max(MIN_INTERVAL_S, self.cost_s / MAX_COST)
        return self._now_s() - self._last_s >= interval_s

    def _take(self, step: int) -> Iterator[Event]:
        start_s = self._now_s()
        # After a rollback this step may be there already, from before.
        self.remove_above(step - 1)
        events = self._saver.save(step)
        yield from self._notes(events)
        self._last_s = self._now_s()
        stall_s = self._last_s - start_s
        self.cost_s = stall_s + self._saver.write_s

    def _notes(self, events: Iterator[Event]) -> Iterator[Event]:
        for event in events:
            if event["event"] == "save_failed":
                text = f"warning: no snapshot of step {event['step']} in memory: {event['why']}"
                yield {"event": "note", "text": text}


def snapshots_in_folder(
    comm: Comm,
    folder: Path,
    *,
    state: Callable[[], TrainState],
    facts: Callable[[int], Facts],
    every: int | None,
    now_s: Callable[[], float] = time.monotonic,
) -> MemorySnapshots:
    """Snapshots of ranks of one launcher, in its folder in memory."""
    saver = Saver(
        comm, folder, state=state, facts=facts, every=0, keep=1, stop_requested=lambda: False
    )

    def remove_above(step: int) -> None:
        if comm.rank == 0:
            _remove_above(folder, step)

    return MemorySnapshots(comm, saver, remove_above=remove_above, every=every, now_s=now_s)


def clean(folder: Path, *, above: int) -> None:
    """Remove partly written snapshots, and those of more than `above` steps, which are trained
    again; one rank calls it, before any rank takes one.
    """
    remove_leftovers(folder)
    _remove_above(folder, above)


def _remove_above(folder: Path, above: int) -> None:
    for number, path in tuple(checkpoints(folder)):
        if number > above:
            shutil.rmtree(path, ignore_errors=True)
