"""`weft eval`: reads and checks what is evaluated, and on what data and layout, before torch is imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from weft.checkpoint.data_file import check_stored_bytes
from weft.commands.console import check_files, show_help, wants_help
from weft.config.command_options import STANDARD_OUTPUT, JsonOptions, json_writer, read_options
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run
from weft.config.schema import (
    MAX_COUNT,
    SCORED,
    BatchConfig,
    DataConfig,
    DataFormat,
    EvalConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
)
from weft.core.precision import Dtype
from weft.core.transports import TransportName
from weft.data.chat_template import FILE as TEMPLATE_FILE
from weft.data.files import ROW_SUFFIXES, inner_name
from weft.data.prepared import prepared_of, sources_of
from weft.errors import Fault, UserError, counted
from weft.generate.model_source import ModelSource, only_model
from weft.hf.folder_checks import weight_faults
from weft.start import environment
from weft.start.checked_run import set_openmp_policy
from weft.start.messages import print_messages
from weft.start.rules import machine
from weft.start.rules.data_sources import validation_faults
from weft.start.rules.fp8_on_gpus import fp8_gpu_faults

USAGE = "RUN | RUN/best | CHECKPOINT | HF-FOLDER [--data SOURCE] [--mesh dp2] [--key value ...]"
LINE = "loss, perplexity and bits per byte of a stored model on any data, on any layout of ranks"
OWN_KEYS = {
    "eval.source": "data",
    "data.source": "data",
    "data.format": "format",
    "data.chat_template": "chat_template",
    "data.tokenizer": "tokenizer",
    "data.packing": "packing",
    "data.seq_len": "seq_len",
    "data.text_field": "text_field",
    "data.round_trip": "round_trip",
    "batch.global_size": "batch_size",
    "batch.micro_size": "micro_size",
}
"""Keys of a run -> the arguments that this command has for them."""


class EvalArguments(JsonOptions):
    """What is evaluated, and how."""

    data: str = Field(
        "", description="source to evaluate on; nothing: the validation data of the run"
    )
    format: Literal["text", "auto", "chat", "instruction", "prompt"] = Field(
        "auto", description="text, or records whose answers count; auto: as --data shows"
    )
    chat_template: str | None = Field(
        None, description="chatml, alpaca, or a Jinja file; None: the run's or the tokenizer's own"
    )
    tokenizer: str = Field("", description="bytes or a tokenizer.json; nothing: the model's own")
    text_field: str = Field("text", description="field or column that holds the text")
    round_trip: Literal["exact", "any"] = Field(
        "exact", description="texts that come back changed from the tokenizer: rejected, or kept"
    )
    packing: Literal["auto", "stream", "documents", "single"] = Field(
        "auto", description="as data.packing of a run"
    )
    seq_len: Annotated[int, Field(ge=1, le=2**24)] | None = Field(
        None, description="length of one sequence, tokens; None: that of the run"
    )
    batches: int = Field(
        0, ge=0, le=MAX_COUNT, description="batches that are evaluated; 0: the whole source"
    )
    batch_size: int = Field(16, ge=1, le=2**24, description="sequences a batch, over all ranks")
    micro_size: int = Field(1, ge=1, le=2**24, description="sequences a forward, on one rank")
    mesh: str = Field("", description='any mesh: "dp2 tp2"; nothing: one rank')
    dtype: Dtype | None = Field(
        None,
        description="number type, without fp8; None: as the run computes, or as the folder stores",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="where ranks compute")
    transport: TransportName = Field("process", description="what a rank is on this machine")


def evaluate(words: Sequence[str]) -> int:
    """Evaluate a stored model."""
    if wants_help(words):
        return show_help(EvalArguments(), f"weft eval {USAGE}", f"compute {LINE}")
    arguments, places = read_options(words, EvalArguments)
    check_files(arguments, "json")
    source = only_model(places, "weft eval", example="--data texts/")
    try:
        run = evaluation_run(source, arguments)
        _check(run, source)
    except UserError as error:
        raise UserError(*dict.fromkeys(map(_with_own_key, error.faults))) from None
    notes = (
        *source.notes,
        *_fp8_notes(run.precision),
        *environment.notes(run.device_mesh, run.device),
    )
    print_messages(f"note: {note}" for note in notes)
    set_openmp_policy()
    from weft.evaluation.main import EvalJob  # late: imports torch, after all checks
    from weft.evaluation.main import evaluate as evaluate_on_ranks

    data = run.eval.source or f"the validation part of {run.data.source}"
    job = EvalJob(source=source, run=run, data=data, as_json=arguments.json is not None)
    return evaluate_on_ranks(job, json_writer(arguments.json or STANDARD_OUTPUT, sys.stdout.write))


def evaluation_run(source: ModelSource, arguments: EvalArguments) -> Run:
    """The stored model's run with the data, the batch and the layout of the evaluation.

    Raises:
        UserError: the tokenizer of the model is unknown.
    """
    stored = source.run
    data = stored.data
    if arguments.data:
        data = _named_data(source, arguments)
    if arguments.seq_len is not None:
        data = data.model_copy(update={"seq_len": arguments.seq_len})
    model = stored.model
    if source.kind == "hf" and model.reads_later_targets:
        model = model.model_copy(update={"mtp_depth": 0})  # not in every folder, and not evaluated
    values = {
        "model": model,
        "mesh": arguments.mesh,
        "device": arguments.device,
        "transport": arguments.transport,
        "loss": stored.loss if stored.loss in SCORED else "cross_entropy",
        "data": data,
        "batch": BatchConfig(global_size=arguments.batch_size, micro_size=arguments.micro_size),
        "parallel": ParallelConfig(context=stored.parallel.context),
        "pipeline": PipelineConfig(),
        "precision": _precision(source, arguments.dtype),
        "eval": EvalConfig(
            every=1, batches=arguments.batches, source=arguments.data or stored.eval.source
        ),
    }
    return stored.with_values(values)


def _precision(source: ModelSource, dtype: Dtype | None) -> PrecisionConfig:
    """As evaluations in the run compute, linears in fp8 too; all in one type where one is asked for."""
    found = dtype or source.dtype
    plain = PrecisionConfig(params=found, compute=found, reduce=found)
    if dtype is not None:
        return plain
    stored = source.run.precision
    return plain.model_copy(update={"linears": stored.linears, "fp8_exclude": stored.fp8_exclude})


def _fp8_notes(precision: PrecisionConfig) -> Iterator[str]:
    if precision.linears == "fp8":
        dtype = precision.compute
        yield f"its linears compute in fp8, as in training; all of it in {dtype}: --dtype {dtype}"


def _named_data(source: ModelSource, arguments: EvalArguments) -> DataConfig:
    """The data that `--data` names, read with the model's tokenizer and template."""
    tokenizer = arguments.tokenizer or source.tokenizer().name
    stored = source.run.data
    record_format: DataFormat = arguments.format
    if stored.format in SCORED:
        record_format = stored.format
    has_rows = inner_name(Path(arguments.data)).endswith(tuple(ROW_SUFFIXES))
    if record_format == "auto" and not has_rows:
        record_format = "text"
    return stored.model_copy(
        update={
            "source": arguments.data,
            "mix": (),
            "tokenizer": tokenizer,
            "format": record_format,
            "chat_template": arguments.chat_template or _template_of_run(stored, arguments.data),
            "packing": arguments.packing,
            "text_field": arguments.text_field,
            "round_trip": arguments.round_trip,
        }
    )


def _template_of_run(data: DataConfig, named: str) -> str | None:
    """The template that a run's data was rendered with, for other records; a prepared folder has its
    own.
    """
    if prepared_of(named) is not None:
        return None
    for source in sources_of(data):
        prepared = prepared_of(source)
        if prepared is not None and (prepared.folder / TEMPLATE_FILE).is_file():
            return str(prepared.folder / TEMPLATE_FILE)
    return data.chat_template


def _check(run: Run, source: ModelSource) -> None:
    """Check layout, data and the stored bytes.

    Raises:
        UserError: with every fault.
    """
    faults = [*run_checks(run, config_checks)]
    if not faults:
        ranks = counted(run.device_mesh.size, "rank")
    else:
        ranks = ""
    if ranks:
        faults.extend(
            replace(fault, fix=f"start {ranks}, or choose another mesh")
            for fault in machine.world_faults(run.device_mesh, None)
        )
    faults.extend(machine.device_faults(run.device))
    of_gpus = () if faults else fp8_gpu_faults(run)
    faults.extend(replace(fault, fix=f"--dtype {run.precision.compute}") for fault in of_gpus)
    faults.extend(
        validation_faults(
            run.data, run.model, run.eval, loss=run.loss, global_size=run.batch.global_size
        )
    )
    if faults:
        raise UserError(*faults)
    if source.kind == "checkpoint":
        check_stored_bytes(source.path)
        return
    missing = tuple(weight_faults(source.path, run.model))
    if missing:
        raise UserError(*missing)


def _with_own_key(fault: Fault) -> Fault:
    """The fault of a key of a run as one of this command's arguments."""
    if fault.key == "loss":
        fix = "--data SOURCE with text, conversations, or prompts with completions"
        return Fault("data", "holds preference pairs, which have no loss of their own", fix=fix)
    fix = fault.fix
    for key, argument in OWN_KEYS.items():
        fix = fix.replace(f"--{key} ", f"--{argument} ")
    return replace(fault, key=OWN_KEYS.get(fault.key, fault.key), fix=fix)
