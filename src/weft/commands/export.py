"""`weft export`: a checkpoint becomes a Hugging Face folder that transformers loads."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from weft.checkpoint.data_file import check_stored_bytes
from weft.checkpoint.folder import FOLDER
from weft.commands.console import print_result, show_help, wants_help
from weft.config.command_options import read_options
from weft.config.hf.write_config import unwritable
from weft.config.schema import ConfigSection
from weft.data.tokenizer import BYTES, FILE
from weft.errors import EXIT_FAILED, EXIT_OK, CheckpointError, Fault, UserError
from weft.generate.model_source import ModelSource, find_model
from weft.hf.gguf_model import model_faults
from weft.hf.gguf_tokenizer import bytes_vocabulary, tokenizer_faults, vocabulary_of
from weft.hf.sidecar import SIDECAR_FOLDER, read_sidecars, reject_existing
from weft.models import FAMILIES
from weft.start.checked_run import set_openmp_policy
from weft.start.messages import print_messages
from weft.start.rules.run_folders import write_problem

if TYPE_CHECKING:
    from weft.hf.export_hf import Merge
    from weft.hf.import_hf import TransferResult

USAGE = "RUN | CHECKPOINT DIR [--dtype bfloat16] [--key value ...]"
LINE = "export a checkpoint as a Hugging Face folder, or as GGUF for llama.cpp"


class ExportOptions(ConfigSection):
    """Flags of `weft export`."""

    format: Literal["safetensors", "gguf"] = Field(
        "safetensors", description="gguf: DIR/model.gguf, for llama.cpp and Ollama"
    )
    dtype: Literal["stored", "float64", "float32", "bfloat16", "float16", "q8_0"] = Field(
        "stored", description="type of the tensors; stored: as in the checkpoint; q8_0: of gguf"
    )
    max_shard_bytes: int = Field(5 * 10**9, ge=1, description="largest file of tensors, bytes")
    adapters: bool = Field(
        False, description="adapters alone, in PEFT's layout; else they are merged into the model"
    )
    merge: tuple[str, ...] = Field(
        (), description="further runs on the same base, whose adapters are added to those of RUN"
    )
    weights: tuple[float, ...] = Field(
        (), description="weights of the adapters of RUN and of merge in the sum; nothing: all 1"
    )
    compare: bool = Field(
        True, description="end with a comparison with transformers, where it is installed"
    )


def export(words: Sequence[str]) -> int:
    """Check the arguments, write the folder, compare."""
    if wants_help(words):
        return show_help(ExportOptions(), f"weft export {USAGE}", LINE)
    options, places = read_options(words, ExportOptions)
    _check_places(places)
    faults = tuple(_format_faults(options, places))
    if faults:
        raise CheckpointError(*faults)
    source = find_exportable(places[0])
    folder = Path(places[1])
    reject_existing(folder)
    _check_writable(folder)
    check_stored_bytes(source.path)
    if options.adapters and not source.run.lora.rank:
        fix = "export the model itself, or train with --lora.rank 8"
        raise CheckpointError(Fault(str(folder), "the model has no adapters to write", fix=fix))
    others = tuple(map(_merged_path, options.merge))
    for path in others:
        check_stored_bytes(path)
    read_sidecars(sidecar_folders(source))
    notes = list(source.plain_notes)
    if not options.adapters and options.format != "gguf":
        notes.extend(_tokenizer_notes(source, folder))
    print_messages(f"note: {note}" for note in notes)
    set_openmp_policy()
    from weft.hf.export_hf import (
        Merge,
        export_adapters,
        export_hf,
    )  # imports torch, and so comes after all checks

    merge = Merge(others, options.weights)
    if options.adapters:
        base = source.run.model.from_hf
        return print_result(export_adapters(source.path, folder, base=base, merge=merge))
    dtype = None if options.dtype == "stored" else options.dtype
    if options.format == "gguf":
        result = _export_gguf(source, folder, options, dtype=dtype, merge=merge)
    else:
        result = export_hf(
            source.path,
            folder,
            dtype=dtype,
            max_shard_bytes=options.max_shard_bytes,
            sidecar_folders=tuple(sidecar_folders(source)),
            compares=options.compare,
            merge=merge,
        )
    print_result("\n".join(result.lines))
    return EXIT_OK if result.is_equal else EXIT_FAILED


def _export_gguf(
    source: ModelSource, folder: Path, options: ExportOptions, *, dtype: str | None, merge: Merge
) -> TransferResult:
    """Describe the model, check that GGUF can hold it and its tokenizer, write it.

    Raises:
        CheckpointError: it cannot.
    """
    from weft.hf.export_hf import describe_checkpoint
    from weft.hf.gguf_file import export_gguf, in_own_terms

    described = describe_checkpoint(
        source.path, folder, dtype=None, sidecar_folders=sidecar_folders(source), merge=merge
    )
    model = in_own_terms(described)
    size = model.config["vocab_size"]
    faults = list(model_faults(model.config))
    text = model.texts.get(FILE)
    if text is not None:
        faults.extend(tokenizer_faults(text, size))
    elif source.run.data.tokenizer != BYTES:
        fix = f"put its {FILE} into the run's folder {SIDECAR_FOLDER}/"
        faults.append(Fault("tokenizer", f"{source.run.data.tokenizer} is not there", fix=fix))
    if faults:
        raise CheckpointError(*faults)
    if text is None:
        vocabulary = bytes_vocabulary(size)
    else:
        vocabulary = vocabulary_of(text, size, end=source.tokenizer().end)
    return export_gguf(model, folder, vocabulary=vocabulary, dtype=dtype, compares=options.compare)


def _format_faults(options: ExportOptions, places: Sequence[str]) -> Iterator[Fault]:
    """Options that the other format has not."""
    is_gguf = options.format == "gguf"
    run, place = places
    if place.endswith(".gguf"):
        folder = place.removesuffix(".gguf") or "exported"
        fix = f"weft export {shlex.quote(run)} {shlex.quote(folder)} --format gguf"
        yield Fault("weft export", "writes model.gguf into a folder", place, "a folder", fix)
    fix = "export without --adapters, which merges them, or without --format"
    if is_gguf and options.adapters:
        yield Fault("adapters", "gguf has the whole model", got="True", need="False", fix=fix)
    if is_gguf and options.max_shard_bytes != ExportOptions().max_shard_bytes:
        fix = "leave it out"
        yield Fault(
            "max_shard_bytes", "gguf is one file", got=str(options.max_shard_bytes), fix=fix
        )
    if options.dtype == "q8_0" and not is_gguf:
        yield Fault("dtype", "safetensors have no such type", got="q8_0", fix="add --format gguf")


def _check_writable(folder: Path) -> None:
    problem = write_problem(folder)
    if problem is not None:
        raise CheckpointError(
            Fault(str(folder), "cannot be written", got=problem, fix="name another folder")
        )


def _check_places(places: Sequence[str]) -> None:
    """Two folders are named.

    Raises:
        UserError: they are not.
    """
    if len(places) != 2:
        got = " ".join(places) or "nothing"
        need = "a run or checkpoint, then the folder to make"
        fix = "for example weft export runs/first exported/first"
        raise UserError(Fault("weft export", "takes two folders", got=got, need=need, fix=fix))


def _merged_path(word: str) -> Path:
    """The checkpoint of adapters that --merge names; its faults are of that option."""
    try:
        return find_exportable(word).path
    except CheckpointError as error:
        faults = (
            replace(fault, key="merge") if fault.key == "model" else fault for fault in error.faults
        )
        raise CheckpointError(*faults) from None


def find_exportable(word: str) -> ModelSource:
    """The checkpoint that `word` names, of a model that transformers has.

    Raises:
        CheckpointError: there is none, or its model has no counterpart in transformers.
    """
    source = find_model(word)
    if source.kind == "hf":
        raise CheckpointError(
            Fault(
                "model",
                "is a Hugging Face folder already",
                got=repr(word),
                need="a run or one of its checkpoints",
                fix="nothing to export: it is in that format",
            )
        )
    faults = tuple(unwritable(source.run.model, FAMILIES))
    if faults:
        raise CheckpointError(*faults)
    return source


def _tokenizer_notes(source: ModelSource, folder: Path) -> Iterator[str]:
    """The exported folder gets no tokenizer.json, as none of the model's folders has one."""
    if not any((place / FILE).is_file() for place in sidecar_folders(source)):
        yield (
            f"{folder} gets no {FILE}: weft generate {shlex.quote(str(folder))} --prompt TEXT "
            f"--tokenizer {source.run.data.tokenizer}"
        )


def sidecar_folders(source: ModelSource) -> Iterator[Path]:
    """Folders that may have the small files of the model: the run's own, the one it started from,
    its tokenizer's.
    """
    if source.path.parent.name == FOLDER:
        yield source.path.parent.parent / SIDECAR_FOLDER
    if source.run.model.from_hf:
        yield Path(source.run.model.from_hf)
    tokenizer = source.run.data.tokenizer
    if tokenizer != BYTES:
        path = Path(tokenizer)
        yield path if path.is_dir() else path.parent
