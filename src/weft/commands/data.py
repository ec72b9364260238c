"""`weft data`: texts to token files (`prepare`), and what a prepared folder holds (`show`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.config import flags
from weft.config.schema import ConfigSection
from weft.data.prepare import PrepareOptions, prepare
from weft.data.prepared import SPLITS, Prepared, PreparedMeta, is_prepared, open_prepared
from weft.errors import (
    EXIT_FAILED,
    EXIT_OK,
    ConfigError,
    DataError,
    Fault,
    UserError,
    counted,
    did_you_mean,
)
from weft.view.bar import ByteProgress
from weft.view.quantity import count, memory

SHOWN_TOKENS = 100
MAX_VOCAB = 2**31
BYTE_VOCAB = 256


class PrepareArguments(ConfigSection):
    """What `weft data prepare` reads and writes."""

    inputs: tuple[str, ...] = Field(
        (),
        description="files, folders, globs: text, .jsonl, .parquet, .gz of the first two; hf:PATH[,CONFIG][:SPLIT]",
    )
    out: str = Field("", description="folder to write")
    tokenizer: str = Field(
        "bytes",
        description="bytes, a tokenizer.json, or train: a BPE of --vocab tokens, trained on the inputs",
    )
    vocab: int = Field(8192, ge=1, lt=MAX_VOCAB, description="tokens of a trained BPE")
    text_field: str = Field(
        "text", description="field of JSONL lines, column of parquet files that holds the text"
    )
    split_on: Literal["file", "blank"] = Field(
        "file", description="text files: one document each, or documents separated by blank lines"
    )
    valid: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.01, description="share of documents kept for validation, 0 to 1"
    )
    seed: int = Field(1, ge=0, lt=2**63, description="seed of the choice of those documents")


class ShowArguments(ConfigSection):
    """What `weft data show` prints."""

    tokens: int = Field(
        SHOWN_TOKENS, ge=0, description="tokens of the first document that are shown as text"
    )
    verify: bool = Field(False, description="read everything and compare with the stored hashes")


def run(words: Sequence[str]) -> int:
    """`weft data prepare ...` or `weft data show ...`."""
    if not words or words[0].startswith("-"):
        usages = [f"  weft data {name:<8} {usage}" for name, usage in USAGE.items()]
        listing = "\n".join(usages)
        return print_result(
            f"usage:\n{listing}\n\nweft data NAME --help lists its options; see also docs/data.md."
        )
    name, *rest = words
    if name not in ACTIONS:
        raise UserError(
            Fault("weft data", f"unknown word {name!r}", fix=did_you_mean(name, ACTIONS))
        )
    return ACTIONS[name](rest)


def prepare_data(words: Sequence[str]) -> int:
    """Tokenize texts into a folder."""
    if wants_help(words):
        usage = f"weft data prepare {USAGE['prepare']}"
        return show_help(PrepareArguments(), usage, "Tokenize texts into a folder to train on.")
    arguments = flags.read_config(_with_flag("--inputs", words), PrepareArguments)
    missing = tuple(_missing_arguments(arguments))
    if missing:
        raise ConfigError(*missing)
    options = PrepareOptions(**arguments.model_dump(exclude={"out"}))
    try:
        with ByteProgress() as bar:
            meta = prepare(options, Path(os.path.expanduser(arguments.out)), bar.show)
    except DataError as error:
        faults = [
            replace(fault, key=ARGUMENT_OF_KEY.get(fault.key, fault.key)) for fault in error.faults
        ]
        raise DataError(*faults) from None
    print_result(_summary(arguments.out, meta))
    return print_result("\n".join(_notes(meta, arguments.out)))


def show(words: Sequence[str]) -> int:
    """Print what is in a prepared folder."""
    if wants_help(words):
        return show_help(
            ShowArguments(),
            f"weft data show {USAGE['show']}",
            "Print what is in a prepared folder.",
        )
    if not words or words[0].startswith("-"):
        raise UserError(Fault("weft data show", "names no folder", fix="weft data show FOLDER"))
    folder = Path(os.path.expanduser(words[0]))
    arguments = flags.read_config(words[1:], ShowArguments)
    if not is_prepared(folder):
        fix = f"weft data prepare INPUT --out {folder}"
        got = repr(str(folder))
        raise DataError(
            Fault("weft data show", "is not a prepared folder", got, "one with meta.json", fix)
        )
    prepared = open_prepared(folder)
    print_result(_summary(str(folder), prepared.meta))
    print_result(_first_document(prepared, max_tokens=arguments.tokens))
    return _verify(prepared) if arguments.verify else EXIT_OK


def _verify(prepared: Prepared) -> int:
    damage = list(prepared.damage())
    if damage:
        print_result("\n".join(damage))
        return EXIT_FAILED
    return print_result("all files match their hashes")


def _with_flag(flag: str, words: Sequence[str]) -> list[str]:
    """The words, with `flag` before those that come before the first flag."""
    starts_with_values = bool(words) and not words[0].startswith("--")
    return [flag, *words] if starts_with_values else list(words)


def _missing_arguments(arguments: PrepareArguments) -> Iterator[Fault]:
    usage = f"weft data prepare {USAGE['prepare']}"
    if not arguments.inputs:
        yield Fault("inputs", "is missing", need="files or folders", fix=usage)
    if not arguments.out:
        yield Fault("out", "is missing", need="a folder to write", fix=usage)


def _summary(folder: str, meta: PreparedMeta) -> str:
    end = "" if meta.end is None else f"; {meta.end} ends a document"
    files = counted(meta.files, "file", spec=",")
    lines = [
        folder,
        f"  from       {', '.join(meta.inputs)}: {files}, {memory(meta.input_bytes)}",
        f"  tokenizer  {meta.tokenizer}, {meta.vocab:,} tokens, stored as {meta.dtype}{end}",
    ]
    for split in SPLITS:
        info = meta.splits[split]
        documents = counted(info.documents, "document", spec=",")
        sizes = f"{count(info.tokens)} tokens in {documents}, the longest of {info.longest:,}"
        lines.append(f"  {split:<9}  {sizes}; sha256 {info.sha256[:12]}")
    return "\n".join(lines)


def _notes(meta: PreparedMeta, out: str) -> Iterator[str]:
    if not meta.splits["valid"].tokens and meta.valid:
        documents = counted(meta.splits["train"].documents, "document")
        more = ", or --split_on blank" if meta.split_on == "file" else ""
        fix = f"raise --valid{more}, or name --eval.source when training"
        yield f"note: none of {documents} is kept for validation: {fix}"
    vocab = f" --model.vocab {meta.vocab}" if meta.vocab > BYTE_VOCAB else ""
    yield f"train on it: weft train --data.source {out}{vocab}"


def _first_document(prepared: Prepared, *, max_tokens: int) -> str:
    length = int(prepared.bounds("train")[1])
    text = ""
    if max_tokens:
        stream = prepared.stream("train", vocab=prepared.meta.vocab)
        shown = stream.read(0, min(length, max_tokens)).tolist()
        text = prepared.tokenizer().decode(shown)
    more = " ..." if length > max_tokens else ""
    tokens = counted(length, "token", spec=",")
    return f"the first document, {tokens}:\n{text}{more}"


USAGE: Mapping[str, str] = {
    "prepare": "INPUT... --out FOLDER [--key value ...]",
    "show": "FOLDER [--key value ...]",
}
ACTIONS: Mapping[str, Callable[[Sequence[str]], int]] = {"prepare": prepare_data, "show": show}
ARGUMENT_OF_KEY = {
    "data.source": "inputs",
    "data.text_field": "text_field",
    "data.tokenizer": "tokenizer",
}
"""Keys of a run -> the arguments that this command has for them."""
