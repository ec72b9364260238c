"""Save checkpoints in the background of training: snapshot, asynchronous writes, commit once all ranks have written.

    step 10    snapshot (training waits), each rank starts to write its file
    step 11    the combined status of the step says that some rank is still writing
    step 12    it does not say so: every rank knows, and rank 0 commits in the background and removes old checkpoints
    step 13    rank 0 emits the `save` event

Statuses are sent with the numbers that every step totals, so agreement costs no collective of its
own. Only when a write failed, and at the end of training, the ranks exchange messages about it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path
from typing import Any

import torch

from weft.checkpoint.commit import commit, discard
from weft.checkpoint.disk import free_bytes
from weft.checkpoint.folder import (
    BEST,
    checkpoint_path,
    checkpoints,
    prune,
    temporary_path,
    write_best,
)
from weft.checkpoint.format import Facts
from weft.checkpoint.kept import kept_folder_of
from weft.checkpoint.remote import RemoteCopies
from weft.checkpoint.state import TrainState, snapshot_of, write_items
from weft.checkpoint.transfer import collect, ranks_without_folder
from weft.checkpoint.write import RankWrite, start_write
from weft.comm.comm import Comm
from weft.comm.text import all_gather_text, broadcast_text
from weft.errors import CheckpointError

Event = dict[str, Any]


class StatusFlag(IntFlag):
    """Status flags of one rank, combined over the ranks with the numbers of every step."""

    STOP_REQUESTED = 1  # this process was asked to save and exit
    WRITING = 2  # its file is not on the disk yet
    WRITE_FAILED = 4  # its file could not be written
    STATE_CHANGED = 8  # its training state changed between two updates


@dataclass(frozen=True)
class PendingSave:
    """A save between its snapshot and its commit, on one rank.

    Attributes:
        best_loss: the evaluation loss, where it is the lowest so far: once committed, the run
            folder records this checkpoint as the best one.
    """

    step: int
    final: Path
    facts: Facts
    start_s: float
    stall_s: float
    write: RankWrite
    best_loss: float | None = None


@dataclass(frozen=True)
class CommitResult:
    """A committed checkpoint.

    Attributes:
        prune_error: why an older one could not be removed.
        remote: URL of its copy; "" if there is none.
        upload_error: why it could not be copied.
    """

    num_bytes: int
    write_s: float
    prune_error: str
    remote: str
    upload_error: str


class Saver:
    """Saves a training state into the run folder; every rank has one and calls it at the same
    points.

    Args:
        state: returns what is to be saved.
        facts: returns the facts of the manifest after a number of steps.
        every: steps between checkpoints; 0: none while training goes on.
        keep: number of newest checkpoints that are kept.
        stop_requested: whether this process has been asked to save and exit.
        last_saved: steps of the checkpoint that the run resumed from.
        separate: ranks that do not share the run folder with rank 0: their files are sent to it.
        remote: on rank 0: copies checkpoints to a URL, after each commit.

    Attributes:
        last_saved: steps of the newest save that was started.
        error: why the newest save failed, or ""; after `finish` the same on all ranks.
        write_s: processor time of this rank's newest write.
    """

    def __init__(
        self,
        comm: Comm,
        run_folder: Path,
        *,
        state: Callable[[], TrainState],
        facts: Callable[[int], Facts],
        every: int,
        keep: int,
        stop_requested: Callable[[], bool],
        last_saved: int = 0,
        separate: Sequence[int] = (),
        remote: RemoteCopies | None = None,
    ) -> None:
        self.comm = comm
        self.run_folder = run_folder
        self.every = every
        self.keep = keep
        self.last_saved = last_saved
        self.error = ""
        self.write_s = 0.0
        self.separate = separate
        self._remote = remote
        self._state = state
        self._facts = facts
        self.stop_requested = stop_requested
        self._writing: PendingSave | None = None
        self._committing: tuple[PendingSave, Future[CommitResult]] | None = None
        self._commit_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="commit")

    def status(self) -> StatusFlag:
        """This rank's status flags for the next gather."""
        status = StatusFlag(0)
        if self.stop_requested():
            status |= StatusFlag.STOP_REQUESTED
        if self._writing is not None:
            if not self._writing.write.done():
                status |= StatusFlag.WRITING
            elif _write_error(self._writing.write):
                status |= StatusFlag.WRITE_FAILED
        return status

    def after_step(
        self, step: int, status: int, *, best_loss: float | None = None
    ) -> Iterator[Event]:
        """Continue or start saves after step `step`, in which some rank had each flag of `status`.

        Args:
            best_loss: the evaluation loss, where it is the lowest so far, and is saved for that.
        """
        yield from self._poll_commit()
        if self._writing is not None and not status & StatusFlag.WRITING:
            has_failed = bool(status & StatusFlag.WRITE_FAILED)
            yield from self._end_writing(self._writing, exchange_errors=has_failed)
        if self.is_due(step) or best_loss is not None:
            yield from self.save(step, best_loss=best_loss)

    def is_due(self, step: int) -> bool:
        """Whether a save follows step `step` while training goes on."""
        return self.every > 0 and step % self.every == 0

    def save(self, step: int, *, best_loss: float | None = None) -> Iterator[Event]:
        """Start to save; waits first for an earlier save that is not committed yet.

        Args:
            best_loss: the evaluation loss, where it is the lowest so far.
        """
        start = time.perf_counter()
        # One save at a time: the next may have the same temporary folder, and would hold one more copy of the state.
        yield from self.wait()
        final = checkpoint_path(self.run_folder, step)
        copied = snapshot_of(self._state())
        write = start_write(
            temporary_path(final),
            self.comm.rank,
            copied.items,
            digests=copied.digests,
            require_finite=True,
            before=copied.under_way.wait,
        )
        stall_s = time.perf_counter() - start
        self._writing = PendingSave(
            step=step,
            final=final,
            facts=self._facts(step),
            start_s=start,
            stall_s=stall_s,
            write=write,
            best_loss=best_loss,
        )
        self.last_saved = step

    def finish(self, step: int, *, save: bool, again: bool = False) -> Iterator[Event]:
        """Save the state after `step` if `save` and it is not saved yet, and wait; then every rank
        knows `error`.

        Args:
            again: whether a save of this step that has failed is tried again.
        """
        if save and (self.last_saved != step or again):
            yield from self.save(step)
        yield from self.wait()
        # The commit is known on rank 0 alone.
        self.error = broadcast_text(self.comm, self.error)

    def into(self, folder: Path) -> Saver:
        """A saver of the same state into another folder; every rank must call it."""
        return Saver(
            self.comm,
            folder,
            state=self._state,
            facts=self._facts,
            every=0,
            keep=1,
            stop_requested=self.stop_requested,
            separate=ranks_without_folder(self.comm, folder),
        )

    def total_bytes(self) -> int:
        """Bytes of the tensors of one checkpoint, over all ranks; every rank must call it."""
        own_bytes = sum(item.num_bytes for item in write_items(self._state()))
        sizes = torch.tensor([own_bytes], device=self.comm.device)
        return int(self.comm.sum_world(sizes).item())

    def copy_run_files(self) -> str:
        """Copy the events of a run that has ended to its URL, if it has one; why that failed, or ""."""
        if self._remote is None:
            return ""
        try:
            self._remote.upload_run_files()
        except CheckpointError as error:
            return _fault_text(error)
        return ""

    def close(self) -> None:
        """End; what is still being written is not waited for."""
        self._commit_thread.shutdown(wait=False, cancel_futures=True)

    def wait(self) -> Iterator[Event]:
        """Wait until no save is pending."""
        if self._writing is not None:
            yield from self._end_writing(self._writing, exchange_errors=True)
        yield from self._poll_commit(wait=True)

    def _end_writing(self, pending: PendingSave, *, exchange_errors: bool) -> Iterator[Event]:
        """Commit or discard once all ranks have written. Without `exchange_errors` it is known that
        none failed.
        """
        # Before anything that may raise an error: the write has ended, and is not to be ended again.
        self._writing = None
        self.write_s = pending.write.cpu_s
        local_error = _write_error(pending.write)
        errors: tuple[str, ...] = ()
        if exchange_errors:
            errors = all_gather_text(self.comm, local_error)
        failing_ranks = [rank for rank, error in enumerate(errors) if error]
        collect_error = ""
        # All ranks know the same errors, so all take the same collective here, or none.
        if failing_ranks:
            num_bytes = torch.tensor([pending.write.num_bytes], device=self.comm.device)
            need_bytes = int(self.comm.sum_world(num_bytes).item())
        else:
            collect_error = self._collect(temporary_path(pending.final))
        if self.comm.rank in self.separate and (failing_ranks or collect_error):
            pending.write.remove_files()  # rank 0 discards the folder of its own host
        if self.comm.rank > 0:
            return
        if collect_error:
            discard(temporary_path(pending.final))
            yield self._failure(pending, collect_error, need_bytes=pending.write.num_bytes)
            return
        if failing_ranks:
            rank = failing_ranks[0]
            discard(temporary_path(pending.final))
            yield self._failure(pending, self._reason(rank, errors[rank]), need_bytes=need_bytes)
            return
        self._committing = (pending, self._commit_thread.submit(self._commit, pending))

    def _collect(self, tmp: Path) -> str:
        """Send the files of other hosts to rank 0; why that failed, or ""."""
        if not self.separate:
            return ""
        try:
            collect(self.comm, tmp, self.separate)
        except CheckpointError as error:
            return _fault_text(error)
        return ""

    def _reason(self, rank: int, error: str) -> str:
        mesh = self.comm.mesh
        if mesh.size == 1:
            return error
        place = mesh.coord_text(rank)
        return f"rank {rank} ({place}): {error}"

    def _commit(self, pending: PendingSave) -> CommitResult:
        tmp = temporary_path(pending.final)
        kept = kept_folder_of(pending.final)  # on an earlier attempt no disk took this step
        # On a thread of rank 0; nothing in here communicates, since other threads of this rank do.
        manifest = commit(tmp, pending.final, pending.facts, ranks=self.comm.mesh.size)
        write_s = time.perf_counter() - pending.start_s
        prune_error = ""
        try:
            if pending.best_loss is not None:
                write_best(self.run_folder, step=pending.step, loss=pending.best_loss)
            # Behind the commit: until then the older checkpoints are the newest ones.
            prune(self.run_folder, self.keep)
            if kept is not None:
                shutil.rmtree(kept, ignore_errors=True)
        except CheckpointError as error:
            prune_error = _fault_text(error)
        except OSError as error:
            prune_error = f"{BEST} cannot be written: {error.strerror}"
        remote, upload_error = self._upload(pending.final)
        return CommitResult(
            num_bytes=manifest.num_bytes,
            write_s=write_s,
            prune_error=prune_error,
            remote=remote,
            upload_error=upload_error,
        )

    def _upload(self, path: Path) -> tuple[str, str]:
        """Copy a checkpoint to the URL of the run, if it has one: the URL of the copy, or why that
        failed.
        """
        if self._remote is None:
            return "", ""
        try:
            return self._remote.upload(path), ""
        except CheckpointError as error:
            return "", _fault_text(error)
        except OSError as error:  # of the files here, which are read again
            return "", f"{path} cannot be read: {error.strerror or error}"

    def _poll_commit(self, *, wait: bool = False) -> Iterator[Event]:
        """The events of the commit, if it has ended."""
        if self._committing is None:
            return
        pending, future = self._committing
        if not wait and not future.done():
            return
        self._committing = None
        try:
            result = future.result()
        except CheckpointError as error:
            yield self._failure(pending, _fault_text(error), need_bytes=pending.write.num_bytes)
            return
        self.error = result.upload_error
        event = {
            "event": "save",
            "step": pending.step,
            "path": str(pending.final),
            "bytes": result.num_bytes,
            "stall_s": pending.stall_s,
            "write_s": result.write_s,
        }
        if result.remote:
            event["remote"] = result.remote
        yield event
        if result.upload_error:
            text = f"warning: step {pending.step} is saved here only: {result.upload_error}"
            yield {"event": "note", "text": text}
        if result.prune_error:
            yield {"event": "note", "text": f"warning: {result.prune_error}"}

    def _failure(self, pending: PendingSave, reason: str, *, need_bytes: int) -> Event:
        self.error = reason
        newest = newest_path(self.run_folder)
        return {
            "event": "save_failed",
            "step": pending.step,
            "why": reason,
            "need_bytes": need_bytes,
            "free_bytes": free_bytes(self.run_folder),
            "newest": str(newest) if newest else None,
        }


def newest_path(run_folder: Path) -> Path | None:
    """The newest checkpoint folder of a run, whether valid or not."""
    for _, path in checkpoints(run_folder):
        return path
    return None


def _write_error(write: RankWrite) -> str:
    """Wait for the write; why it failed, or ""."""
    try:
        write.wait()
    except CheckpointError as error:
        return _fault_text(error)
    return ""


def _fault_text(error: CheckpointError) -> str:
    return "; ".join(str(fault) for fault in error.faults)
