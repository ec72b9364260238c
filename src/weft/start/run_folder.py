"""The run folder of a training run: a new name, its lock, and the check that it can be written and holds no other run."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from weft.checkpoint.disk import replace_file
from weft.checkpoint.folder import FOLDER
from weft.checkpoint.resume import AUTO
from weft.config.schema import ModelSection
from weft.errors import Fault, UserError
from weft.run.agent import restart_number
from weft.run.folder_lock import acquire, acquire_new, held_fault
from weft.run.world import job_name
from weft.small_files import UnreadableFile, read_text
from weft.start.environment import is_first
from weft.train.event_log import EVENTS

RUNS = Path("runs")
JOB = ".job"
"""File in the folder of an elastic run: the name of the job that trains it."""
MAX_JOB_BYTES = 4096


def new_run_folder(model: ModelSection, now: datetime) -> Path:
    """A run folder that does not exist yet: `runs/llama3-tiny-20260131-120000`."""
    base = RUNS / f"{model.label}-{now:%Y%m%d-%H%M%S}"
    folder = base
    number = 1
    while folder.exists():
        number += 1
        folder = base.with_name(f"{base.name}-{number}")
    return folder


@contextlib.contextmanager
def locked_out(
    model: ModelSection, out: str | None, resume: str | None, *, now: datetime
) -> Iterator[str]:
    """The run folder, a new one where `out` is None; it is locked while open by the process that
    starts or is the first rank.

    Raises:
        UserError: another process writes into the folder.
    """
    if not is_first(os.environ):
        yield out or str(new_run_folder(model, now))
        return
    job = job_name(os.environ)
    if out:
        held = acquire(Path(out), job=job)
    else:
        folder, held = acquire_new(new_run_folder(model, now), job=job)
        out = str(folder)
    with held:
        faults = tuple(_holds_run(out, resume))  # another run may have ended since the checks
        if faults:
            raise UserError(*faults)
        yield out


def out_faults(run_folder: str | None, resume: str | None) -> Iterator[Fault]:
    """The run folder must be writable and hold no other run; only the first rank checks."""
    if not is_first(os.environ):
        return
    out = Path(run_folder) if run_folder else RUNS
    in_use = None
    if run_folder and "\0" not in run_folder:
        in_use = held_fault(out, job=job_name(os.environ))
    if in_use:
        faults = [in_use]
    else:
        faults = list(_holds_run(run_folder, resume))
    if faults:
        yield from faults
        return
    problem = write_problem(out)
    if problem is not None:
        yield Fault(
            "out",
            "cannot be written",
            got=f"{str(out)!r}: {problem}",
            need="a folder",
            fix="choose another --out",
        )


def _holds_run(run_folder: str | None, resume: str | None) -> Iterator[Fault]:
    """A fresh start needs a folder without a run."""
    if not run_folder:
        return
    out = Path(run_folder)
    events = out / EVENTS
    checkpoints = out / FOLDER
    holds_run = os.path.exists(events) or os.path.exists(checkpoints)
    if holds_run and not resumes_in(out, resume):
        yield Fault(
            "out",
            "holds a run already",
            got=repr(str(out)),
            need=f"a folder without {EVENTS}",
            fix="--resume auto to resume it, another --out, or none for a new folder under runs/",
        )


def resumes_in(out: Path, resume: str | None) -> bool:
    """Whether the checkpoint that a run resumes is in its own folder."""
    if resume is None:
        return False
    if resume == AUTO:
        return True
    named = Path(resume).resolve()
    return out.resolve() in (named, named.parent, named.parent.parent)


def write_problem(folder: Path) -> str | None:
    """Why `folder` cannot be created or written, judged by its nearest existing parent; creates
    nothing.
    """
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.stat(folder)  # rejects names that no file system takes
        existing = folder
        while not os.path.lexists(existing):
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return error.strerror or str(error)
    except ValueError as error:  # a zero byte in the name
        return str(error)


def mark_job(out: Path, env: Mapping[str, str]) -> None:
    """Write the name of the job into the folder of an elastic run; the first rank does."""
    job = job_name(env)
    if job and is_first(env):
        replace_file(out / JOB, job)


def is_started_again(out: Path, *, is_elastic: bool) -> bool:
    """Whether the agent has started the ranks of this run before.

    torchrun counts restarts after failures only: not those that add or remove machines, and anew on
    a machine that is added. So the folder of an elastic run names its job.
    """
    if restart_number(os.environ):
        return True
    job = job_name(os.environ)
    if not is_elastic or not job:
        return False
    try:
        return read_text(out / JOB, max_bytes=MAX_JOB_BYTES) == job
    except UnreadableFile:
        return False
