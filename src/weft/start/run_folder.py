"""The run folder of a training run: a new name, its lock, and the job that it belongs to."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path

from weft.checkpoint.disk import replace_file
from weft.config.schema import ModelSection
from weft.errors import UserError
from weft.run.agent import restart_number
from weft.run.folder_lock import acquire, acquire_new
from weft.run.world import job_name
from weft.small_files import UnreadableFile, read_text
from weft.start.environment import is_first
from weft.start.rules.run_folders import RUNS, holds_run

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
        faults = tuple(holds_run(out, resume))  # another run may have ended since the checks
        if faults:
            raise UserError(*faults)
        yield out


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
