"""`weft data`: texts to token files (`prepare`), and what a prepared folder holds (`show`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.commands.data_show import USAGE as SHOW_USAGE
from weft.commands.data_show import show, summary
from weft.config import flags
from weft.config.schema import SCORED, ConfigSection, DataFormat
from weft.data.prepare import PrepareOptions, prepare
from weft.data.prepared import TEXT, PreparedMeta
from weft.data.record_sources import PREFERENCE
from weft.data.round_trip import ACCEPT
from weft.data.streams import is_url
from weft.errors import ConfigError, DataError, Fault, UserError, counted, did_you_mean
from weft.view.bar import ByteProgress

MAX_VOCAB = 2**31
THREADS_VARIABLE = "RAYON_NUM_THREADS"
"""Threads of the library tokenizers, which reads it when it encodes first."""
BYTE_VOCAB = 256


class PrepareArguments(ConfigSection):
    """What `weft data prepare` reads and writes."""

    inputs: tuple[str, ...] = Field(
        (),
        description="files, folders, globs, URLs: text, JSON, CSV, TSV, tar (also .gz .xz .bz2 .zst), parquet; "
        "hf:PATH[,CONFIG][:SPLIT]",
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
    format: DataFormat = Field(
        "text", description="text, or records to fine-tune on; auto: by the fields of the first"
    )
    classes: tuple[str, ...] = Field(
        (), description="names of the classes of labelled records, in the order of their numbers"
    )
    chat_template: str | None = Field(
        None,
        description="chatml, alpaca, or a Jinja file that renders messages; None: the tokenizer's own",
    )
    split_on: Literal["file", "blank"] = Field(
        "file", description="text files: one document each, or documents separated by blank lines"
    )
    valid: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.01, description="share of documents kept for validation, 0 to 1"
    )
    seed: int = Field(1, ge=0, lt=2**63, description="seed of the choice of those documents")
    workers: int = Field(
        0,
        ge=0,
        le=4096,
        description="threads of a tokenizer.json; 0: one a core; the result is the same",
    )


def run(words: Sequence[str]) -> int:
    """`weft data prepare ...` or `weft data show ...`."""
    if not words or words[0].startswith("-"):
        usages = [f"  weft data {name:<8} {usage}" for name, usage in USAGE.items()]
        listing = "\n".join(usages)
        return print_result(
            f"usage:\n{listing}\n\n`weft data NAME --help` lists its options; see also docs/data.md."
        )
    name, *rest = words
    if name not in ACTIONS:
        raise UserError(
            Fault("weft data", f"unknown word {name!r}", fix=did_you_mean(name, ACTIONS))
        )
    try:
        return ACTIONS[name](rest)
    except DataError as error:
        raise DataError(*map(_with_own_flags, error.faults)) from None


def _with_own_flags(fault: Fault) -> Fault:
    """The fault of a key of a run as one of this command's arguments."""
    fix = fault.fix
    for key, argument in ARGUMENT_OF_KEY.items():
        if argument != "inputs":
            fix = fix.replace(f"--{key} ", f"--{argument} ")
    return replace(fault, key=ARGUMENT_OF_KEY.get(fault.key, fault.key), fix=fix)


def prepare_data(words: Sequence[str]) -> int:
    """Tokenize texts into a folder."""
    if wants_help(words):
        usage = f"weft data prepare {USAGE['prepare']}"
        return show_help(PrepareArguments(), usage, "tokenize texts into a folder to train on")
    arguments = flags.read_config(_with_flag("--inputs", words), PrepareArguments)
    missing = tuple(_missing_arguments(arguments))
    if missing:
        raise ConfigError(*missing)
    if arguments.workers:
        os.environ[THREADS_VARIABLE] = str(arguments.workers)
    options = PrepareOptions(**arguments.model_dump(exclude={"out", "workers"}))
    with ByteProgress() as bar:
        out = Path(os.path.expanduser(arguments.out))
        meta = prepare(options, out, bar.show)
    print_result(summary(arguments.out, meta))
    return print_result("\n".join(_notes(meta, arguments.out)))


def _with_flag(flag: str, words: Sequence[str]) -> list[str]:
    """The words, with `flag` before those that come before the first flag."""
    starts_with_values = bool(words) and not words[0].startswith("--")
    if starts_with_values:
        return [flag, *words]
    return list(words)


def _missing_arguments(arguments: PrepareArguments) -> Iterator[Fault]:
    usage = f"weft data prepare {USAGE['prepare']}"
    if not arguments.inputs:
        yield Fault("inputs", "is missing", need="files or folders", fix=usage)
    if not arguments.out:
        yield Fault("out", "is missing", need="a folder to write", fix=usage)
    elif is_url(arguments.out):
        need = "a folder of this machine"
        fix = "write it here, then copy it: a run reads prepared folders behind URLs"
        yield Fault("out", "is a URL", got=repr(arguments.out), need=need, fix=fix)


def _notes(meta: PreparedMeta, out: str) -> Iterator[str]:
    if not meta.splits["valid"].tokens and meta.valid:
        documents = counted(meta.splits["train"].documents, "document")
        has_files = meta.split_on == "file" and meta.record_format == TEXT
        more = ", or --split_on blank" if has_files else ""
        fix = f"raise --valid{more}, or name --eval.source when training"
        yield f"note: none of {documents} is kept for validation: {fix}"
    changed = ""
    if meta.num_changed:
        texts = counted(meta.num_changed, "text")
        yield f"note: the tokenizer does not reproduce {texts}; {meta.first_changed}"
        changed = f" {ACCEPT}"
    if meta.num_shared:
        texts = counted(meta.num_shared, "text")
        yield f"note: in {texts} a token is of prompt and answer, and counts"
    if meta.vocab > BYTE_VOCAB:
        vocab = f" --model.vocab {meta.vocab}"
    else:
        vocab = ""
    loss = _loss_words(meta)
    yield f"train on it: weft train --data.source {out}{vocab}{loss}{changed}"


def _loss_words(meta: PreparedMeta) -> str:
    """The flags of the loss that reads these records."""
    if meta.record_format == PREFERENCE:
        return " --loss dpo"
    if meta.record_format not in SCORED:
        return ""
    classes = f" --data.classes {' '.join(meta.classes)}" if meta.classes else ""
    return f" --loss {meta.record_format}{classes}"


USAGE: Mapping[str, str] = {
    "prepare": "INPUT... --out FOLDER [--key value ...]",
    "show": SHOW_USAGE,
}
ACTIONS: Mapping[str, Callable[[Sequence[str]], int]] = {"prepare": prepare_data, "show": show}
ARGUMENT_OF_KEY = {
    "data.source": "inputs",
    "data.text_field": "text_field",
    "data.tokenizer": "tokenizer",
    "data.format": "format",
    "data.chat_template": "chat_template",
}
"""Keys of a run -> the arguments that this command has for them."""
