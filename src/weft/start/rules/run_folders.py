"""Rules of the folders of a run: its own can be written and holds no other run; those that it starts from exist."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from weft.checkpoint.folder import FOLDER
from weft.checkpoint.remote_url import is_url, url_faults
from weft.checkpoint.resume import AUTO, check_model, find_checkpoint, starts_new
from weft.config.schema import LoraConfig, ModelSection
from weft.errors import CheckpointError, Fault
from weft.hf.folder_checks import weight_faults
from weft.run.folder_lock import held_fault
from weft.run.world import job_name
from weft.start.environment import LOCAL_RANK_VARIABLES, is_first
from weft.start.remote_folder import has_copy
from weft.train.event_log import EVENTS

RUNS = Path("runs")


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
        faults = list(holds_run(run_folder, resume))
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


def holds_run(run_folder: str | None, resume: str | None) -> Iterator[Fault]:
    """A fresh start needs a folder without a run."""
    if not run_folder:
        return
    out = Path(run_folder)
    events = out / EVENTS
    checkpoints = out / FOLDER
    is_used = os.path.exists(events) or os.path.exists(checkpoints)
    if is_used and not resumes_in(out, resume):
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


def remote_faults(remote: str | None, out: str | None, resume: str | None) -> Iterator[Fault]:
    """The URL for checkpoints can be read, and holds no other run; one process of a machine asks."""
    if out and is_url(out):
        what = "is a URL, and save.remote names one too"
        yield Fault("out", what, got=repr(out), fix="leave save.remote out")
        return
    if remote is None:
        return
    faults = tuple(url_faults(remote))
    if faults or not is_first(os.environ, LOCAL_RANK_VARIABLES):
        yield from faults
        return
    try:
        is_used = has_copy(remote)
    except CheckpointError as error:
        yield from error.faults
        return
    if is_used and not (out and resumes_in(Path(out), resume)):
        fix = "--resume auto to resume it, or another URL"
        yield Fault(
            "out",
            "holds a run already",
            got=repr(remote),
            need="a URL without checkpoints",
            fix=fix,
        )


def from_hf_faults(
    model: ModelSection, *, resume: str | None = None, out: str | None = None
) -> Iterator[Fault]:
    """The Hugging Face folder that a new run starts from must hold the model's tensors, judged by
    their names.
    """
    if model.from_hf is None or not starts_new(resume, out):
        return
    for fault in weight_faults(Path(model.from_hf), model):
        yield replace(fault, key="model.from_hf", what=f"{fault.key}: {fault.what}")


def lora_base_faults(lora: LoraConfig, model: ModelSection) -> Iterator[Fault]:
    """The checkpoint that `lora.base` means must exist and be of this model, judged by its
    manifest.

        lora.base = runs/x                      the newest valid checkpoint of that run
        lora.base = runs/x/ckpt/step-000100     this checkpoint

    Adapters that it has itself are merged into its parameters.
    """
    key = "lora.base"
    base = lora.base
    if base is None:
        return
    if not lora.rank:
        what = "is 0, no adapters, but lora.base names their base model"
        yield Fault("lora.rank", what, fix="--lora.rank 8")
        return
    if model.from_hf is not None:
        what = "the model has initial parameters already"
        yield Fault(key, what, got=f"model.from_hf {model.from_hf!r}", fix="name one of them")
        return
    if "\0" in base:
        yield Fault(
            key, "is not a valid file name", got=repr(base), fix="name a run or a checkpoint"
        )
        return
    if base == AUTO:
        what = "names no run: auto is a value of resume"
        yield Fault(
            key,
            what,
            got=repr(base),
            need="a run folder or a checkpoint",
            fix="--lora.base runs/first",
        )
        return
    try:
        found = find_checkpoint(base)
        if found.path is not None and found.manifest is not None:
            facts = found.manifest.facts
            check_model(found.path, facts, family=model.name, architecture=model.architecture)
            return
    except CheckpointError as error:
        for fault in error.faults:
            yield Fault(
                key, f"{fault.key}: {fault.what}", got=fault.got, need=fault.need, fix=fault.fix
            )
        return
    if found.faults:
        yield found.faults[0]
    else:
        fix = "a run with --save.every, or one of its checkpoints"
        yield Fault(key, "holds no checkpoint", got=repr(base), fix=fix)
