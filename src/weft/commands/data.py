"""Owns `weft data`: texts to token files (`prepare`), and what is in them (`show`). No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.config import flags
from weft.config.schema import ConfigSection
from weft.data.prepare import Recipe, prepare
from weft.data.prepared import SPLITS, Meta, Prepared, is_prepared, open_prepared
from weft.errors import EXIT_FAILED, EXIT_OK, ConfigError, DataError, Fault, UserError, did_you_mean
from weft.view.bar import Bar
from weft.view.quantity import count, memory

SHOWN_TOKENS = 100
MANY = 2**31


class Preparing(ConfigSection):
    """What `weft data prepare` makes of what."""

    inputs: tuple[str, ...] = Field(
        (), description="files, folders, globs: text, .jsonl, .parquet, .gz of the first two; hf:PATH[,CONFIG][:SPLIT]"
    )
    out: str = Field("", description="folder to make")
    tokenizer: str = Field(
        "bytes", description="bytes, a tokenizer.json, or train: a BPE of --vocab tokens, trained on the inputs"
    )
    vocab: int = Field(8192, ge=1, lt=MANY, description="tokens of a BPE that is trained")
    text_field: str = Field("text", description="field of JSONL lines, column of parquet files that holds the text")
    split_on: Literal["file", "blank"] = Field(
        "file", description="text files: a document each, or blank lines part them"
    )
    valid: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.01, description="share of documents kept for validation, 0 to 1"
    )
    seed: int = Field(1, ge=0, lt=2**63, description="which documents those are")


class Showing(ConfigSection):
    """What `weft data show` looks at."""

    tokens: int = Field(SHOWN_TOKENS, ge=0, description="tokens of the first document that are shown as text")
    verify: bool = Field(False, description="read everything, and compare with what was written")


def run(words: Sequence[str]) -> int:
    """`weft data prepare ...` or `weft data show ...`."""
    if not words or words[0].startswith("-"):
        text = "\n".join(f"  weft data {name:<8} {usage}" for name, usage in USAGE.items())
        return print_result(f"usage:\n{text}\n\nweft data NAME --help tells its keys; docs/data.md tells the rest.")
    name, *rest = words
    if name not in ACTIONS:
        raise UserError(Fault("weft data", f"unknown word {name!r}", fix=did_you_mean(name, ACTIONS)))
    return ACTIONS[name](rest)


def prepare_data(words: Sequence[str]) -> int:
    """Texts to a folder of tokens."""
    if wants_help(words):
        return show_help(
            Preparing(), f"weft data prepare {USAGE['prepare']}", "Texts to a folder of tokens that trains."
        )
    asked = flags.read_config(_named("--inputs", words), Preparing)
    if missing := tuple(_missing(asked)):
        raise ConfigError(*missing)
    recipe = Recipe(**asked.model_dump(exclude={"out"}))
    try:
        with Bar() as bar:
            meta = prepare(recipe, Path(asked.out).expanduser(), bar.show)
    except DataError as error:
        raise DataError(*(replace(fault, key=KEYS.get(fault.key, fault.key)) for fault in error.faults)) from None
    print_result(_told(asked.out, meta))
    return print_result("\n".join(_notes(meta, asked.out)))


def show(words: Sequence[str]) -> int:
    """What is in a prepared folder."""
    if wants_help(words):
        return show_help(Showing(), f"weft data show {USAGE['show']}", "What is in a prepared folder.")
    if not words or words[0].startswith("-"):
        raise UserError(Fault("weft data show", "names no folder", fix="weft data show FOLDER"))
    folder, asked = Path(words[0]).expanduser(), flags.read_config(words[1:], Showing)
    if not is_prepared(folder):
        fix = f"weft data prepare INPUT --out {folder}"
        raise DataError(Fault("weft data show", "is no prepared folder", repr(str(folder)), "one with meta.json", fix))
    found = open_prepared(folder)
    print_result(_told(str(folder), found.meta))
    print_result(_first_document(found, asked.tokens))
    damage = list(found.damage()) if asked.verify else []
    print_result("\n".join(damage) if damage else "everything is as it was written") if asked.verify else None
    return EXIT_FAILED if damage else EXIT_OK


def _named(flag: str, words: Sequence[str]) -> list[str]:
    """Words before the first flag are the values of `flag`."""
    loose = next((place for place, word in enumerate(words) if word.startswith("--")), len(words))
    return [flag, *words] if loose else list(words)


def _missing(asked: Preparing) -> Iterator[Fault]:
    usage = f"weft data prepare {USAGE['prepare']}"
    if not asked.inputs:
        yield Fault("input", "names no file", fix=usage)
    if not asked.out:
        yield Fault("out", "names no folder", fix=usage)


def _told(folder: str, meta: Meta) -> str:
    lines = [
        f"{folder}",
        f"  from       {', '.join(meta.inputs)}: {meta.files:,} files, {memory(meta.input_bytes)}",
        f"  tokenizer  {meta.tokenizer}, {meta.vocab:,} tokens, kept as {meta.dtype}"
        + ("" if meta.end is None else f"; {meta.end} ends a document"),
    ]
    for split in SPLITS:
        part = meta.splits[split]
        sizes = f"{count(part.tokens)} tokens in {part.documents:,} documents, the longest of {part.longest:,}"
        lines.append(f"  {split:<9}  {sizes}; sha256 {part.sha256[:12]}")
    return "\n".join(lines)


def _notes(meta: Meta, out: str) -> Iterator[str]:
    if not meta.splits["valid"].tokens and meta.valid:
        documents = meta.splits["train"].documents
        more = ", or --split_on blank" if meta.split_on == "file" else ""
        yield f"note: none of {documents} documents fell to validation: raise --valid{more}, or name --eval.source when training"
    vocab = f" --model.vocab {meta.vocab}" if meta.vocab > 256 else ""
    yield f"train on it: weft train --data.source {out}{vocab}"


def _first_document(found: Prepared, most: int) -> str:
    bounds, stream = found.bounds("train"), found.stream("train", vocab=found.meta.vocab)
    length = int(bounds[1])
    text = found.tokenizer().decode(stream.read(0, min(length, most)).tolist()) if most else ""
    return f"the first document, {length:,} tokens:\n{text}" + (" ..." if length > most else "")


USAGE: Mapping[str, str] = {
    "prepare": "INPUT... --out FOLDER [--tokenizer bytes|tokenizer.json|train] [--vocab 8192] [--valid 0.01] ...",
    "show": "FOLDER [--tokens 100] [--verify True]",
}
ACTIONS: Mapping[str, Callable[[Sequence[str]], int]] = {"prepare": prepare_data, "show": show}
KEYS = {"data.source": "input", "data.text_field": "text_field", "data.tokenizer": "tokenizer"}
"""Keys of a run -> the words that this command has for them."""
