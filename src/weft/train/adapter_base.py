"""Owns what adapters stand beside where it is a run of weft's own: which checkpoint, asked at the door; its values, read later.

    lora.base = runs/x                      the newest whole checkpoint of that run
    lora.base = runs/x/ckpt/step-000100     this one

Adapters that it has itself are merged: the new ones stand beside what the old ones made of the model.
"""

from __future__ import annotations

from collections.abc import Iterable

from weft.checkpoint.folder import Found
from weft.checkpoint.match import check_model
from weft.config.checks import Check
from weft.config.run import Run
from weft.errors import CheckpointError, Fault
from weft.train.resume import find

KEY = "lora.base"


def base_of_run(run: Run) -> Found:
    """The checkpoint that `lora.base` means.

    Raises:
        CheckpointError: one is named that is none, or is damaged.
    """
    return find(run.model_copy(update={"resume": run.lora.base}))


def base_faults(run: Run) -> Iterable[Fault]:
    """What keeps a checkpoint from being the base, as far as its manifest tells."""
    if run.lora.base is None:
        return
    if not run.lora.rank:
        yield Fault("lora.rank", "is 0, no adapters, and lora.base names what they stand beside", fix="--lora.rank 8")
    elif run.model.from_hf is not None:
        yield Fault(
            KEY, "the model has a start already", f"model.from_hf {run.model.from_hf!r}", fix="name one of them"
        )
    elif "\0" in run.lora.base:
        yield Fault(KEY, "no file system has such a name", repr(run.lora.base))
    else:
        yield from _stored_faults(run)


def _stored_faults(run: Run) -> Iterable[Fault]:
    try:
        found = base_of_run(run)
        if found.path is None or found.manifest is None:
            fix = "a run with --save.every, or one of its checkpoints"
            yield found.faults[0] if found.faults else Fault(KEY, "holds no checkpoint", repr(run.lora.base), fix=fix)
            return
        check_model(found.path, found.manifest.facts, family=run.model.name, architecture=run.model.architecture)
    except CheckpointError as error:
        yield from (
            Fault(KEY, f"{fault.key}: {fault.what}", fault.got, fault.need, fault.fix) for fault in error.faults
        )


CHECKS = (Check((KEY, "lora.rank", "model"), base_faults),)
