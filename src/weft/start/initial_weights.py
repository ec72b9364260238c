"""Checks of the files that a new run reads its initial parameters from, by names and manifests, without torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from weft.checkpoint.resume import AUTO, check_model, find_checkpoint, starts_new
from weft.config.schema import LoraConfig, ModelSection
from weft.errors import CheckpointError, Fault
from weft.hf.folder_checks import weight_faults


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
