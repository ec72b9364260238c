"""The `end` event of a run that fails: written by a process that is left, and copied to the URL of the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.folder import checkpoints, next_command
from weft.checkpoint.remote import RemoteFolder
from weft.errors import CheckpointError, DataError, RankError
from weft.run.failure import describe_error
from weft.run.world import World
from weft.start.messages import print_error
from weft.train.event_log import append_end_event, end_run_of_dead_writer, last_step


@dataclass(frozen=True)
class RecordFolder:
    """Where the events of a run are.

    Attributes:
        out: the run folder; None: the run has none.
        remote: URL of its copies, or None.
    """

    out: Path | None
    remote: str | None = None

    def copy(self) -> None:
        """Copy the events to the URL, unless another run writes there; a warning if that fails."""
        if self.out is None or self.remote is None:
            return
        try:
            folder = RemoteFolder.open(self.remote)
            if folder.is_writer(self.out):
                folder.upload_run_files(self.out)
        except CheckpointError as error:
            reasons = "; ".join(str(fault) for fault in error.faults)
            sys.stderr.write(f"warning: the events of the end are here only: {reasons}\n")


@contextmanager
def end_of_local_ranks(folder: RecordFolder) -> Iterator[None]:
    """After the ranks have ended, append the `end` event that a killed rank 0 could not write, or
    put the root cause into that of a rank 0 that failed because another rank did.

    Raises:
        RankError: the error of the ranks, with the command to resume or to start again.
    """
    out = folder.out
    if out is None:
        yield
        return
    start_s = time.perf_counter()
    try:
        yield
    except KeyboardInterrupt:
        append_end_event(out, "interrupted", seconds=time.perf_counter() - start_s)
        print_error(interrupted_text(out))
        raise
    except RankError as error:
        advised = _with_next_command(error, out)
        append_end_event(out, "failed", error=str(advised), seconds=time.perf_counter() - start_s)
        folder.copy()
        raise advised from error.__cause__
    except DataError as error:
        # a file that has changed since the ranks started, found before they are started again
        seconds = time.perf_counter() - start_s
        append_end_event(out, "failed", error=str(error), seconds=seconds)
        raise
    # Ended by SIGTERM without an error; no effect after a normal end.
    append_end_event(out, "interrupted", seconds=time.perf_counter() - start_s)


def interrupted_text(out: Path) -> str:
    """One line for Ctrl-C: the step, what is saved, and how to go on."""
    step = last_step(out)
    reached = f"after step {step}" if step else "before the first step"
    newest = next(checkpoints(out), None)
    saved = "nothing" if newest is None else f"step {newest[0]}"
    parts = (f"interrupted {reached}", f"saved: {saved}", next_command(out))
    return "; ".join(part for part in parts if part)


def _with_next_command(error: RankError, out: Path) -> RankError:
    """The error with the command that resumes the run, or starts it again without a checkpoint."""
    command = next_command(out)
    if error.kind != "failure" or not command:
        return error
    return RankError(error.rank, error.where, f"{error.message}\n  {command}", kind=error.kind)


@contextmanager
def end_of_joined_rank(folder: RecordFolder, world: World) -> Iterator[None]:
    """Around everything that a rank of torchrun or Slurm does: rank 0, which has written its `end`
    event, copies it; another rank that fails because it has lost a peer writes the `end` event that
    a killed rank 0 could not write.
    """
    try:
        yield
    except Exception as error:
        if world.rank == 0:
            folder.copy()
        elif folder.out is not None:
            failure = describe_error(error, rank=world.rank, at_s=time.monotonic())
            message = f"rank 0 was killed; rank {world.rank} failed: {failure.text}"
            is_secondary = failure.kind == "secondary"
            if is_secondary and end_run_of_dead_writer(folder.out, error=message):
                folder.copy()
        raise
