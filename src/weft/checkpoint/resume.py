"""Select the checkpoint that a run resumes from, and check that the run's config matches it. Pure: no torch.

    resume = auto                       newest valid checkpoint of the run folder `out`; if there is none, start a new run
    resume = runs/x                     newest valid checkpoint of another run folder
    resume = runs/x/ckpt/step-000100    this checkpoint

Whatever determines the numbers must be unchanged: model, data and its order, loss, optimizer, dtype
of the parameters. The layout may change, and so may what is chosen per step: learning rate, number of
steps, clipping.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.checkpoint.folder import (
    FOLDER,
    FoundCheckpoint,
    best_checkpoint,
    checkpoints,
    find_newest,
)
from weft.checkpoint.format import MANIFEST, Facts
from weft.checkpoint.manifest import read_manifest
from weft.checkpoint.remote_url import is_url
from weft.code.identity import CodeIdentity, changed_parts
from weft.config.optimizers import resume_values
from weft.config.schema import DpoConfig, ModelSection
from weft.config.user_code import file_folder
from weft.errors import CheckpointError, Fault

KEY, AUTO = "resume", "auto"
NO_CODE = CodeIdentity()

RESUME_KEYS = (
    *(KEY, "out", "model", "seed", "batch", "data", "optim", "precision", "lora"),
    *("loss", "dpo", "neftune"),
)
"""Keys and sections that `resume_faults` reads."""

SAME_KEYS = (
    "seed",
    "batch.global_size",
    "data.seq_len",
    "data.order",
    "precision.params",
    "loss",
    "neftune",
    "lora.rank",
    "lora.alpha",
    "lora.targets",
    "lora.dora",
    "lora.quantize",
)
"""Config keys that must be unchanged. With another seed or batch size the data order would not
continue.
"""

SAME_KEYS_WITH_LORA = ("precision.compute",)
"""Further ones of runs with adapters: frozen parameters are stored in this dtype."""

LABELS = "labels"
WITHOUT_LABELS: Mapping[str, Any] = {LABELS: 0}
"""Of checkpoints of earlier versions, which have no such field."""

DPO_DEFAULTS = {f"dpo.{name}": value for name, value in DpoConfig().model_dump().items()}
"""Further ones of runs on preference pairs, with the values of checkpoints of earlier versions, which
hold `beta` alone.
"""

SAME_DATA_FACTS = ("sha256", "samples", "weights")
"""Facts about the data source that must be unchanged; its location may change."""

SAME_DATA_FACTS_ONCE = ("sha256", "samples", "shares")
"""Those of checkpoints of earlier versions, whose mixtures have no `weights`."""

DOCUMENTS_SHA256 = "documents_sha256"
"""Fact of a text packed by documents, which checkpoints of earlier versions do not have."""

PACKING = "packing"
"""Fact of a text: sequences packed in another way have the same hash and number, and other targets."""


def starts_new(resume: str | None, out: str | None) -> bool:
    """Whether a run starts from initial parameters, not from a checkpoint; `auto` may find none
    yet.
    """
    if resume is None:
        return True
    if resume != AUTO:
        return False
    stored = checkpoints(Path(out or ""))
    return not any(stored)


def run_folder_of(resume: str, out: str | None) -> Path | None:
    """The run folder whose newest checkpoint `resume` means; None if it names one checkpoint."""
    if resume == AUTO:
        return Path(out or "")
    path = Path(resume)
    if os.path.exists(path / MANIFEST):
        return None
    if os.path.isdir(path / FOLDER):
        return path
    if path.name == FOLDER and os.path.isdir(path):
        return path.parent
    return None


def find_checkpoint(
    resume: str, out: str | None = None, *, below: int | None = None
) -> FoundCheckpoint:
    """The checkpoint that `resume` means, of fewer than `below` steps; without a path if there is
    none.

    Raises:
        CheckpointError: `resume` names one checkpoint, and that does not exist or is damaged.
    """
    folder = run_folder_of(resume, out)
    if folder is not None:
        return find_newest(folder, below=below)
    if below is not None:
        return FoundCheckpoint(path=None, manifest=None, faults=())
    path = best_checkpoint(Path(resume)) or Path(resume)
    return FoundCheckpoint(path=path, manifest=read_manifest(path), faults=())


def resume_faults(
    model: ModelSection,
    config: Mapping[str, Any],
    *,
    resume: str | None,
    out: str | None,
    code: CodeIdentity = NO_CODE,
) -> Iterable[Fault]:
    """What prevents a run from resuming, as far as manifests tell.

    Args:
        config: all keys of the run, as JSON.
        code: of users, with what it has read so far.
    """
    if resume is None:
        return ()
    if resume == AUTO and not out:
        fix = "--out with the folder of the run, or --resume with a checkpoint"
        return (
            Fault(KEY, "auto searches the run folder, and out is not set", need="out", fix=fix),
        )
    if "\0" in resume:
        return (
            Fault(
                KEY,
                "is not a valid file name",
                got=repr(resume),
                fix="name a run folder or a checkpoint",
            ),
        )
    if is_url(resume):
        fix = "--out with this URL and --resume auto, or copy the checkpoint here"
        return (Fault(KEY, "is a URL", got=repr(resume), need="a local folder", fix=fix),)
    try:
        found = find_checkpoint(resume, out)
    except CheckpointError as error:
        return tuple(_fault_of_key(fault) for fault in error.faults)
    if found.path is None or found.manifest is None:
        return _not_found_faults(resume, out, found)
    facts = found.manifest.facts
    checked_code = None if _value(config, "resume_code") == "any" else code
    model_faults = _model_changes(model, facts, found.path, checked_code)
    key_faults = _key_changes(config, facts, found.path)
    return (*model_faults, *key_faults)


def _not_found_faults(resume: str, out: str | None, found: FoundCheckpoint) -> tuple[Fault, ...]:
    """All checkpoints are damaged, or there is none although one was named; `auto` may start a new
    run.
    """
    if found.faults:
        newest = replace(found.faults[0], fix="")
        what = f"no checkpoint of {run_folder_of(resume, out)} is valid; the newest: {newest}"
        return (Fault(KEY, what, fix="move the ckpt folder away to start a new run"),)
    if resume == AUTO:
        return ()
    return (
        Fault(
            KEY,
            "there is no checkpoint in this run folder",
            got=repr(resume),
            fix="name another one",
        ),
    )


def _model_changes(
    model: ModelSection, facts: Facts, path: Path, code: CodeIdentity | None = NO_CODE
) -> Iterator[Fault]:
    """Code and fields of the model that differ from the checkpoint's.

    Args:
        code: None: any code may follow.
    """
    if code is not None:
        yield from _code_changes(model, facts, path, code)
    try:
        check_model(path, facts, family=model.name, architecture=model.architecture)
    except CheckpointError as error:
        for fault in error.faults:
            yield _fault_of_key(fault)


def _code_changes(
    model: ModelSection, facts: Facts, path: Path, code: CodeIdentity
) -> Iterator[Fault]:
    """Other code of users than that of the checkpoint; checkpoints of earlier versions know the
    digest of the model file alone.
    """
    restore = "restore it"
    if model.digest is not None:
        restore = f"restore it (a copy is {path.parents[1] / 'model.py'})"
    fix = f"{restore}, or --resume_code any to train on with this code"
    if facts.code:
        names = changed_parts(facts.code, code, folder=file_folder(model.name))
        if names:
            what = f"the code of the model differs from that of the checkpoint {path}"
            yield Fault("model.name", f"{what}: {', '.join(names)}", fix=fix)
        return
    stored = _value(facts.run, "model.digest")
    if stored is not None and model.digest not in (None, stored):
        what = f"the model file has changed since {path} was written"
        yield Fault("model.name", what, got=str(model.digest), need=str(stored), fix=fix)


def _optimizer_changes(config: Mapping[str, Any], facts: Facts, path: Path) -> Iterator[Fault]:
    """Another optimizer than that of the checkpoint, whose state would not fit."""
    if not is_other_optimizer(config, facts) or _value(config, "optim.on_change") == "fresh":
        return
    stored = facts.run["optim"]
    current = config["optim"]
    fresh = "--optim.on_change fresh to begin with fresh optimizer state"
    before, now = resume_values(stored), resume_values(current)
    differing = [
        name for name in ("name", "state_dtype", "state_block") if before[name] != now[name]
    ]
    if differing:
        key = f"optim.{differing[0]}"
        got = str(current[differing[0]])
        need = str(before[differing[0]] or stored.get(differing[0]))
        fix = f"--{key} {need}, or {fresh}"
    else:
        key = "optim.groups"
        got = "other optimizers of some parameters"
        need = "the same groups"
        fix = f"the groups of its run.toml, or {fresh}"
    what = f"differs from the checkpoint {path}"
    yield Fault(key, what, got=got, need=need, fix=fix)


def is_other_optimizer(config: Mapping[str, Any], facts: Facts) -> bool:
    """Whether a run has another optimizer of some parameters than a checkpoint.

    Args:
        config: all keys of the run, as JSON.
    """
    stored: dict[str, Any] = facts.run.get("optim") or {}
    return bool(stored) and resume_values(stored) != resume_values(config["optim"])


def _key_changes(config: Mapping[str, Any], facts: Facts, path: Path) -> Iterator[Fault]:
    """Other keys that differ from the checkpoint's and must not."""
    yield from _optimizer_changes(config, facts, path)
    has_lora = bool(_value(config, "lora.rank"))
    if has_lora and not _value(facts.run, "lora.rank"):
        yield _new_adapters(config, path)
        return
    keys: tuple[str, ...] = SAME_KEYS
    if has_lora:
        keys += SAME_KEYS_WITH_LORA
    if _value(config, "loss") == "dpo":
        keys += tuple(DPO_DEFAULTS)
    for key in keys:
        stored = _value(facts.run, key)
        current = _value(config, key)
        if stored is None and _value(facts.run, "loss") == "dpo":
            stored = DPO_DEFAULTS.get(key)
        if key == "lora.quantize":  # which checkpoints of earlier versions do not have
            stored, current = stored or "none", current or "none"
        if stored is not None and stored != current:
            if isinstance(stored, list):
                words = " ".join(str(item) for item in stored)
            else:
                words = stored
            what = f"differs from the checkpoint {path}"
            yield Fault(key, what, got=str(current), need=str(stored), fix=f"--{key} {words}")


def _new_adapters(config: Mapping[str, Any], path: Path) -> Fault:
    """A model without adapters, of a run or an import, is resumed with some."""
    return Fault(
        "lora.rank",
        f"the checkpoint {path} has no adapters",
        got=str(_value(config, "lora.rank")),
        need="0",
        fix=f"--lora.base {path} in place of resume, in another run folder, or --lora.rank 0",
    )


def check_model(path: Path, facts: Facts, *, family: str, architecture: Mapping[str, Any]) -> None:
    """Reject a checkpoint of another model: its family, or a field of the model config that
    determines shapes.

    Raises:
        CheckpointError: names every field that differs.
    """
    if family != facts.family:
        raise CheckpointError(_other_model(path, "family", facts.family, family))
    current = {name: _json_value(value) for name, value in architecture.items()}
    stored = {**WITHOUT_LABELS, **facts.architecture} if LABELS in current else facts.architecture
    names = dict.fromkeys((*stored, *current))
    faults = [
        _other_model(path, name, stored.get(name), current.get(name))
        for name in names
        if stored.get(name) != current.get(name)
    ]
    if faults:
        raise CheckpointError(*faults)


def data_changes(stored: Mapping[str, Any], current: Mapping[str, Any]) -> Iterator[Fault]:
    """Facts about the data source that differ from those in the checkpoint."""
    keys: tuple[str, ...] = SAME_DATA_FACTS if "weights" in stored else SAME_DATA_FACTS_ONCE
    if DOCUMENTS_SHA256 in current:
        keys = (*keys, DOCUMENTS_SHA256)
    for key in keys:
        if key in stored and stored[key] != current.get(key):
            fix = "resume with the data that the run was trained on, or start a new run"
            what = f"other data than the checkpoint was trained on: {key} differs"
            yield Fault(
                "data.source", what, got=str(current.get(key)), need=str(stored[key]), fix=fix
            )
    packing = stored.get(PACKING)
    if packing is not None and packing != current.get(PACKING, packing):
        yield Fault(
            "data.packing",
            "differs from that of the checkpoint",
            got=str(current[PACKING]),
            need=str(packing),
            fix=f"--data.packing {packing}",
        )


def _other_model(path: Path, key: str, got: Any, need: Any) -> Fault:
    fix = "give the model as in the run.toml of its run"
    return Fault(
        str(path),
        f"a checkpoint of another model: {key} differs",
        got=f"{got!r}",
        need=f"{need!r}",
        fix=fix,
    )


def _json_value(value: Any) -> Any:
    """`value` as JSON returns it: tuples become lists."""
    if isinstance(value, (tuple, list)):
        return [_json_value(item) for item in value]
    return value


def _value(config: Mapping[str, Any], key: str) -> Any:
    """The value of a dotted key; None if there is none."""
    value: Any = config
    for name in key.split("."):
        if isinstance(value, dict):
            value = value.get(name)
        else:
            value = None
    return value


def _fault_of_key(fault: Fault) -> Fault:
    """A fault of a file, reported for the config key that named the file."""
    return Fault(KEY, f"{fault.key}: {fault.what}", got=fault.got, need=fault.need, fix=fault.fix)
