"""Owns which checkpoint a run goes on from, and whether it may: asked at the door, before torch is imported.

    resume = auto               the newest whole checkpoint of the run folder `out`; none yet: start anew
    resume = runs/x             the newest whole checkpoint of another run folder
    resume = runs/x/ckpt/step-000100    this one

What decides numbers must be as it was: the model, what it reads and in which order, the optimizer, the type of the
parameters. The layout may change, and so may what is a choice from step to step: learning rate, number of steps, clipping.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from weft.checkpoint.folder import FOLDER, Found, find_newest
from weft.checkpoint.format import MANIFEST, Facts
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.match import check_model
from weft.config.checks import Check
from weft.config.run import Run
from weft.errors import CheckpointError, Fault

KEY, AUTO = "resume", "auto"

SAME_KEYS = (
    *("seed", "batch.global_size", "data.seq_len", "optim.name", "precision.params"),
    *("lora.rank", "lora.alpha", "lora.targets"),
)
"""Keys that must be as they were. Another seed or batch would not go on with the data where it stopped."""

BASE_KEYS = ("precision.compute",)
"""Those of runs with adapters besides: what is frozen is held in this type."""

SAME_DATA = ("sha256", "samples", "shares")
"""What the source says of itself and must say again; where it lies may change."""


def folder_of(run: Run) -> Path | None:
    """The run folder whose newest checkpoint is wanted; None where one checkpoint is named."""
    if run.resume == AUTO:
        return Path(run.out or "")
    named = Path(run.resume or "")
    if os.path.exists(named / MANIFEST):
        return None
    if os.path.isdir(named / FOLDER):
        return named
    return named.parent if named.name == FOLDER and os.path.isdir(named) else None


def find(run: Run, *, below: int | None = None) -> Found:
    """The checkpoint to go on from, of fewer than `below` steps; no path where there is none.

    Raises:
        CheckpointError: one checkpoint is named, and it is none, or is damaged.
    """
    if (folder := folder_of(run)) is not None:
        return find_newest(folder, below=below)
    path = Path(run.resume or "")
    return Found(path, read_manifest(path), ()) if below is None else Found(None, None, ())


def resume_faults(run: Run) -> Iterable[Fault]:
    """What keeps the run from going on, as far as manifests tell."""
    if run.resume is None:
        return ()
    if run.resume == AUTO and not run.out:
        fix = "--out with the folder of the run, or --resume with a checkpoint"
        return (Fault(KEY, "auto looks in the run folder, and none is named", need="out", fix=fix),)
    if "\0" in run.resume:
        return (Fault(KEY, "no file system has such a name", repr(run.resume)),)
    try:
        found = find(run)
    except CheckpointError as error:
        return tuple(_as_ours(fault) for fault in error.faults)
    if found.path is None or found.manifest is None:
        return _nothing_found(run, found)
    return tuple(changes(run, found.manifest.facts, found.path))


def _nothing_found(run: Run, found: Found) -> tuple[Fault, ...]:
    """All checkpoints are broken, or there is none although one was named; `auto` may begin."""
    if found.faults:
        fix = "move the ckpt folder away to start anew"
        what = f"no checkpoint of {folder_of(run)} is whole; the newest: {found.faults[0]}"
        return (Fault(KEY, what, fix=fix),)
    if run.resume == AUTO:
        return ()
    return (Fault(KEY, "there is no checkpoint in this run folder", repr(run.resume), fix="name another one"),)


def changes(run: Run, facts: Facts, path: Path) -> Iterator[Fault]:
    """What of this run is not as it was when the checkpoint was written, and must be."""
    try:
        check_model(path, facts, family=run.model.name, architecture=run.model.architecture)
    except CheckpointError as error:
        yield from map(_as_ours, error.faults)
    for key in (*SAME_KEYS, *BASE_KEYS) if run.lora.rank else SAME_KEYS:
        then, now = _value(facts.run, key), _value(run.model_dump(mode="json"), key)
        if then is not None and then != now:
            word = " ".join(map(str, then)) if isinstance(then, list) else then
            yield Fault(key, f"is not that of the checkpoint {path}", str(now), str(then), f"--{key} {word}")


def data_changes(stored: dict[str, Any], now: dict[str, Any]) -> Iterator[Fault]:
    """What the source says of itself that it did not say when the checkpoint was written."""
    for key in SAME_DATA:
        if key in stored and stored[key] != now.get(key):
            fix = "resume with the data that the run was trained on, or start a new run"
            what = f"other data than the checkpoint was trained on: {key} differs"
            yield Fault("data.source", what, str(now.get(key)), str(stored[key]), fix)


def _value(config: dict[str, Any], key: str) -> Any:
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _as_ours(fault: Fault) -> Fault:
    """A fault of a file, told as one of the key that named it."""
    return Fault(KEY, f"{fault.key}: {fault.what}", fault.got, fault.need, fault.fix)


CHECKS = (Check((KEY, "out", "model", "seed", "batch", "data", "optim", "precision", "lora"), resume_faults),)
