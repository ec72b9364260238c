"""Owns the folder of a run's checkpoints: their names, which is newest, what is removed. Pure: no torch.

OUT/ckpt/step-000100/            a checkpoint: it has this name only once it is whole
OUT/ckpt/.tmp-step-000200/       one that is being written, or was when the run ended
OUT/ckpt/.old-step-000050/       one that is being removed
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft.checkpoint.disk import sync_folder
from weft.checkpoint.format import Manifest
from weft.checkpoint.manifest import read_manifest
from weft.errors import CheckpointError, Fault

FOLDER = "ckpt"
TEMPORARY, REMOVED = ".tmp-", ".old-"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Found:
    """The newest checkpoint that looks whole, if any, and what is wrong with those newer than it."""

    path: Path | None
    manifest: Manifest | None
    faults: tuple[Fault, ...]


def checkpoint_path(run_folder: Path, step: int) -> Path:
    """Where the checkpoint behind `step` optimizer steps stands."""
    return run_folder / FOLDER / f"step-{step:06d}"


def temporary_path(final: Path) -> Path:
    """Where a checkpoint is written before it is one."""
    return final.with_name(TEMPORARY + final.name)


def checkpoints(run_folder: Path) -> Iterator[tuple[int, Path]]:
    """Steps and folders of all checkpoints, newest first, whole or not."""
    folder = run_folder / FOLDER
    names = os.listdir(folder) if folder.is_dir() else ()
    steps = sorted((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), reverse=True)
    return ((step, checkpoint_path(run_folder, step)) for step in steps)


def find_newest(run_folder: Path, *, below: int | None = None) -> Found:
    """The newest checkpoint (of fewer than `below` steps) whose manifest reads and whose files have their lengths.

    Bytes of tensors are not looked at: `Checkpoint.verify` does that, and where it fails, ask again with `below`.
    """
    faults: list[Fault] = []
    for step, path in checkpoints(run_folder):
        if below is None or step < below:
            try:
                return Found(path, read_manifest(path), tuple(faults))
            except CheckpointError as error:
                faults += error.faults
    return Found(None, None, tuple(faults))


def prune(run_folder: Path, keep: int) -> tuple[Path, ...]:
    """Remove what is older than the `keep` newest checkpoints; broken ones do not count. Returns what is gone.

    A checkpoint loses its name before its files: none is ever seen half removed.

    Raises:
        CheckpointError: the folder does not let go of one.
    """
    kept, gone = 0, list[Path]()
    for _, path in checkpoints(run_folder):
        if kept >= keep:
            gone.append(path)
            continue
        try:
            read_manifest(path)
            kept += 1
        except CheckpointError:
            continue
    for path in gone:
        _remove(path)
    return tuple(gone)


def _remove(path: Path) -> None:
    dying = path.with_name(REMOVED + path.name)
    shutil.rmtree(dying, ignore_errors=True)
    try:
        path.rename(dying)
        sync_folder(path.parent)
    except OSError as error:
        raise CheckpointError(Fault(str(path), f"an old checkpoint cannot be removed: {error.strerror}")) from error
    shutil.rmtree(dying, ignore_errors=True)


def remove_leftovers(run_folder: Path) -> tuple[Path, ...]:
    """Remove what earlier runs left half written or half removed; one rank calls it, before any writes."""
    folder = run_folder / FOLDER
    names = os.listdir(folder) if folder.is_dir() else ()
    left = tuple(folder / name for name in sorted(names) if name.startswith((TEMPORARY, REMOVED)))
    for path in left:
        shutil.rmtree(path, ignore_errors=True)
    return left
