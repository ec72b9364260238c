"""The checks of a run before it starts that read data, files, ports, devices or torch, bound to the sections of its config."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from functools import partial

from weft.checkpoint.resume import RESUME_KEYS, resume_faults
from weft.config.optimizers import is_user_class, uses_8_bits
from weft.config.rules.checks import Check
from weft.config.rules.layout import sums_have_no_order
from weft.config.run import Run
from weft.config.schema import LoraConfig, ModelSection, OptimConfig
from weft.errors import ConfigError, Fault
from weft.models.code_of_run import code_of_run
from weft.start.rules import machine, run_folders
from weft.start.rules.compiled_code import compiled_code_faults
from weft.start.rules.data_sources import READ_KEYS, sample_faults, source_faults, validation_faults
from weft.start.rules.fp8_on_gpus import fp8_gpu_faults
from weft.track.alert_rules import alert_faults
from weft.track.tracker import tracker_faults


def data_checks(run: Run) -> tuple[Check, ...]:
    """The checks of training and validation data, bound to the sections of a run."""
    training = Check(
        reads=READ_KEYS,
        find=partial(
            source_faults, run.data, run.model, loss=run.loss, has_labels=run.dpo.has_labels
        ),
    )
    validation = Check(
        reads=(*READ_KEYS, "eval", "batch.global_size"),
        find=partial(
            validation_faults,
            run.data,
            run.model,
            run.eval,
            loss=run.loss,
            has_labels=run.dpo.has_labels,
            global_size=run.batch.global_size,
        ),
    )
    return training, validation


def environment_checks(run: Run) -> tuple[Check, ...]:
    """The checks of a training run that read files, ports and devices, bound to its sections."""
    starts_from = {"resume": run.resume, "out": run.out}
    has_ranks = partial(
        machine.world_faults, run.device_mesh, run.nproc, is_elastic=run.run.elastic
    )
    has_base = partial(run_folders.lora_base_faults, run.lora, run.model)
    resumes = partial(_resume_faults, run)
    return (
        Check(("mesh", "nproc"), has_ranks),
        *folder_checks(run),
        Check(("port",), partial(machine.port_faults, run.port)),
        Check((*READ_KEYS, "sample"), partial(sample_faults, run.data, run.model, run.sample)),
        Check(("device",), partial(machine.device_faults, run.device)),
        Check(("compile", "device"), partial(machine.compiler_faults, run.compile, run.device)),
        Check(
            reads=("compile", "device", "mesh", "model", "prove.before"),
            find=partial(compiled_code_faults, run, os.environ),
        ),
        Check(("precision", "device", "mesh", "model"), partial(fp8_gpu_faults, run)),
        Check(
            reads=(
                "device",
                "mesh",
                "model",
                "batch",
                "data.seq_len",
                "optim.name",
                "parallel.zero",
                "precision",
            ),
            find=partial(machine.memory_faults, run),
        ),
        Check(("transport",), partial(machine.transport_faults, run.transport)),
        Check(("track",), partial(tracker_faults, run.track)),
        Check(("alert",), partial(alert_faults, run.alert, os.environ)),
        Check(
            reads=("save.remote", "out", "resume"),
            find=partial(run_folders.remote_faults, run.save.remote, run.out, run.resume),
        ),
        Check(
            reads=("model", "resume"),
            find=partial(run_folders.from_hf_faults, run.model, **starts_from),
        ),
        Check(("lora.base", "lora.rank", "model"), has_base),
        Check(RESUME_KEYS, resumes),
        *optimizer_checks(run),
    )


def _resume_faults(run: Run) -> Iterable[Fault]:
    return resume_faults(
        run.model,
        run.model_dump(mode="json"),
        resume=run.resume,
        out=run.out,
        code=code_of_run(run.model.name, run.optim.name),
    )


def optimizer_checks(run: Run) -> tuple[Check, ...]:
    """The checks of optimizers and groups of parameters against the model, of runs and proofs."""
    return (
        Check(
            reads=("optim", "model", "lora"),
            find=partial(_optimizer_faults, run.optim, run.model, run.lora),
        ),
        Check(
            reads=("deterministic", "parallel.zero", "optim"),
            find=partial(
                _order_of_sums_faults,
                run.optim,
                zero=run.parallel.zero,
                is_deterministic=run.deterministic,
            ),
        ),
    )


def folder_checks(run: Run) -> tuple[Check, ...]:
    """The check of the run folder."""
    return (Check(("out", "resume"), partial(run_folders.out_faults, run.out, run.resume)),)


def _optimizer_faults(optim: OptimConfig, model: ModelSection, lora: LoraConfig) -> Iterable[Fault]:
    """What is wrong with a user's optimizer class, its states, or groups of parameters; torch is
    imported only for these.
    """
    if is_user_class(optim.name):
        from weft.train.optimizers.user_class import class_faults  # imports torch

        yield from class_faults(optim.name, optim.options)
    if optim.groups or (uses_8_bits(optim) and is_user_class(optim.name)):
        from weft.train.optimizers.start_checks import group_faults  # imports torch

        yield from group_faults(optim, model, lora)


def _order_of_sums_faults(
    optim: OptimConfig, *, zero: int, is_deterministic: bool
) -> Iterator[Fault]:
    """Under ZeRO, sums of a user's class are added over data ranks, in no fixed order."""
    if not is_deterministic or not zero or not is_user_class(optim.name):
        return
    from weft.train.optimizers.user_class import load_class  # imports torch

    try:
        kind = load_class(optim.name).kind
    except ConfigError:
        return  # `_optimizer_faults` reports it
    if kind == "reductions":
        yield sums_have_no_order(f"{optim.name} adds sums", zero=zero)
