"""The checkpoint folder of a run: names, the newest valid checkpoint, pruning, leftovers of a crash. Pure: no torch.

OUT/ckpt/step-000100/              a checkpoint; it gets this name only once it is complete
OUT/best.json                      step and evaluation loss of the checkpoint with the lowest one (save.best)
OUT/ckpt/.tmp-step-000200/         being written, or left by a run that died while writing
OUT/ckpt/.old-step-000050/         being removed
OUT/ckpt/aside-step-000300/        of steps after the one that a run resumed from: kept, never read again
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.disk import sync_folder
from weft.checkpoint.format import DIGEST, MANIFEST, Manifest
from weft.checkpoint.kept import remove_checkpoint
from weft.checkpoint.manifest import read_manifest
from weft.errors import CheckpointError, Fault
from weft.small_files import UnreadableFile, read_json_object

FOLDER = "ckpt"
BEST = "best.json"
BEST_NAME = "best"
"""Last part of the path RUN/best, by which commands find the best checkpoint of a run."""
MAX_BEST_BYTES = 4096
TEMPORARY_PREFIX = ".tmp-"
REMOVED_PREFIX = ".old-"
ASIDE_PREFIX = "aside-"
MAX_FAULTS = 10
"""Of folders without a manifest and its checksum that are named one by one."""
MAX_BROKEN = 1000
"""Checkpoints with a manifest and a checksum that are read in search of a valid one."""
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class FoundCheckpoint:
    """The newest checkpoint with a valid manifest (None if there is none), and the faults of newer
    ones.
    """

    path: Path | None
    manifest: Manifest | None
    faults: tuple[Fault, ...]


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Folder of the checkpoint after `step` optimizer steps."""
    return run_folder / FOLDER / f"step-{step:06d}"


def temporary_path(final: Path) -> Path:
    """Folder in which a checkpoint is written before its commit."""
    return final.with_name(TEMPORARY_PREFIX + final.name)


def checkpoints(run_folder: Path) -> Iterator[tuple[int, Path]]:
    """Steps and folders of all checkpoints, newest first, valid or not."""
    for step in steps_of(_names(run_folder / FOLDER)):
        yield step, checkpoint_path(run_folder, step)


def steps_of(names: Iterable[str]) -> list[int]:
    """Steps of the checkpoints among the names of a folder, newest first."""
    matches = (_NAME.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def find_newest(run_folder: Path, *, below: int | None = None) -> FoundCheckpoint:
    """The newest checkpoint (of fewer than `below` steps) with a valid manifest and files of the
    right lengths.

    Tensor bytes are not read: `Checkpoint.verify` does that; where it fails, call again with
    `below`.
    """
    faults: list[Fault] = []
    num_broken = 0
    for step, path in checkpoints(run_folder):
        if below is not None and step >= below:
            continue
        if len(faults) >= MAX_FAULTS and not _has_manifest(path):
            continue  # one of many folders that hold no checkpoint
        if num_broken == MAX_BROKEN:
            faults.insert(0, _older_fault(path))  # where many are not shown
            break
        try:
            manifest = read_manifest(path)
        except CheckpointError as error:
            faults += error.faults
            num_broken += 1
            continue
        return FoundCheckpoint(path=path, manifest=manifest, faults=tuple(faults))
    return FoundCheckpoint(path=None, manifest=None, faults=tuple(faults))


def _has_manifest(path: Path) -> bool:
    """Whether there are the files of a manifest; a commit names a folder after both are written."""
    return os.path.exists(path / DIGEST) and os.path.exists(path / MANIFEST)


def _older_fault(path: Path) -> Fault:
    return Fault(
        str(path),
        f"this and older checkpoints are not read, as {MAX_BROKEN:,} newer ones are broken",
        fix="remove the broken ones, or name the checkpoint",
    )


def write_best(run_folder: Path, *, step: int, loss: float) -> None:
    """Record which checkpoint has the lowest evaluation loss, atomically."""
    text = json.dumps({"step": step, "loss": loss})
    temporary = run_folder / f".{BEST}.{os.getpid()}"
    with temporary.open("w", encoding="utf-8") as file:
        file.write(f"{text}\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(run_folder / BEST)


def forget_best(run_folder: Path) -> None:
    """Record no checkpoint as the best one."""
    (run_folder / BEST).unlink(missing_ok=True)


def recorded_best(run_folder: Path) -> int | None:
    """The step that is recorded as the one with the lowest evaluation loss."""
    path = run_folder / BEST
    try:
        step = read_json_object(path, max_bytes=MAX_BEST_BYTES, within=run_folder).get("step")
    except UnreadableFile:
        return None
    return step if type(step) is int and step >= 0 else None


def best_step(run_folder: Path) -> int | None:
    """The step of the checkpoint with the lowest evaluation loss; None where none is recorded, or
    it is gone.
    """
    step = recorded_best(run_folder)
    if step is None or not checkpoint_path(run_folder, step).is_dir():
        return None
    return step


def best_checkpoint(path: Path) -> Path | None:
    """The checkpoint that the name RUN/best means; None for any other path.

    Raises:
        CheckpointError: the run has recorded none.
    """
    run_folder = path.parent
    is_name = path.name == BEST_NAME and (run_folder / "run.toml").exists()
    if not is_name or path.exists():
        return None
    step = best_step(run_folder)
    if step is None:
        fix = f"name {run_folder}, or train with --save.best True --eval.every 100"
        what = "the run has recorded no best checkpoint"
        raise CheckpointError(Fault(str(path), what, fix=fix))
    return checkpoint_path(run_folder, step)


def prune(run_folder: Path, keep: int) -> tuple[Path, ...]:
    """Remove checkpoints older than the `keep` newest valid ones, but the best one; returns what was
    removed. Invalid ones do not count.

    A checkpoint is renamed before its files are removed, so a partly removed one is never read.

    Raises:
        CheckpointError: a checkpoint cannot be removed.
    """
    num_kept = 0
    removed = []
    best = best_step(run_folder)
    for step, path in checkpoints(run_folder):
        # Newest first: what comes behind the valid ones that are kept is older, valid or not.
        if num_kept == keep:
            if step != best:
                removed.append(path)
            continue
        try:
            read_manifest(path)
        except CheckpointError:
            continue
        num_kept += 1
    for path in removed:
        _remove(path)
    return tuple(removed)


def _remove(path: Path) -> None:
    renamed = path.with_name(REMOVED_PREFIX + path.name)
    # What an earlier removal has left: the rename would fail.
    remove_checkpoint(renamed)
    try:
        path.rename(renamed)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            Fault(str(path), f"an old checkpoint cannot be removed: {error.strerror}")
        ) from error
    remove_checkpoint(renamed)


def remove_leftovers(run_folder: Path) -> tuple[Path, ...]:
    """Remove partly written or partly removed checkpoints of earlier runs; one rank calls it,
    before any rank writes.
    """
    folder = run_folder / FOLDER
    leftovers = [
        folder / name
        for name in sorted(_names(folder))
        if name.startswith((TEMPORARY_PREFIX, REMOVED_PREFIX))
    ]
    for path in leftovers:
        remove_checkpoint(path)
    return tuple(leftovers)


def set_aside(run_folder: Path, *, above: int) -> tuple[Path, ...]:
    """Rename checkpoints of more than `above` steps, as a resumed run trains those steps again; one
    rank calls it.
    """
    renamed = []
    for step, path in tuple(checkpoints(run_folder)):
        if step > above:
            renamed.append(set_one_aside(path))
    return tuple(renamed)


def set_one_aside(path: Path) -> Path:
    """Rename a checkpoint that is not to be read again; its new name."""
    return path.rename(_unused_aside_path(path))


def _unused_aside_path(path: Path) -> Path:
    target = path.with_name(ASIDE_PREFIX + path.name)
    number = 1
    while target.exists():
        number += 1
        target = path.with_name(f"{ASIDE_PREFIX}{path.name}-{number}")
    return target


def _names(folder: Path) -> list[str]:
    if folder.is_dir():
        return os.listdir(folder)
    return []


def resume_command(run_folder: Path) -> str:
    """The command line that resumes the run of a folder from its newest checkpoint."""
    config = shlex.quote(f"{run_folder}/run.toml")
    return f"weft train {config} --resume auto"


def next_command(run_folder: Path) -> str:
    """How a run that has ended early goes on: `resume: COMMAND`, or that it starts again; "" in a
    folder without a config.
    """
    if not (run_folder / "run.toml").is_file():
        return ""
    has_checkpoint = any(True for _ in checkpoints(run_folder))
    label = "resume" if has_checkpoint else "no checkpoint; start again"
    return f"{label}: {resume_command(run_folder)}"
