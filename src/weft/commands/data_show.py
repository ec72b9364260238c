"""`weft data show`: what a prepared folder holds, and records with the tokens that count in the loss."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby, islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field

from weft.commands.console import print_result, show_help, wants_help
from weft.config.command_options import read_options
from weft.config.schema import SCORED, ConfigSection, RecordFormat
from weft.data.conversations import PAIR, MaskedTokens
from weft.data.files import find_files
from weft.data.prepared import SPLITS, TEXT, Prepared, PreparedMeta, Split, prepared_of
from weft.data.record_sources import GROUPED, encode_records, make_reader
from weft.data.row_files import holds_rows
from weft.data.streams import is_url, source_files
from weft.data.tokenizer import Tokenizer, open_tokenizer
from weft.errors import EXIT_FAILED, EXIT_OK, DataError, Fault, UserError, counted
from weft.view.answers import TextSegment, marked_text
from weft.view.quantity import count, memory

USAGE = "FOLDER | RECORDS.jsonl [--samples 3] [--key value ...]"
SHOWN_TOKENS = 100
COLUMNS = 80


class ShowArguments(ConfigSection):
    """What `weft data show` prints."""

    tokens: int = Field(
        SHOWN_TOKENS, ge=0, description="tokens of the first document that are shown as text"
    )
    samples: int = Field(
        0, ge=0, le=10_000, description="records that are shown with the tokens that count"
    )
    verify: bool = Field(False, description="read everything and compare with the stored hashes")
    classes: tuple[str, ...] = Field(
        (), description="names of the classes of labelled records, in the order of their numbers"
    )
    format: Literal["auto"] | RecordFormat = Field(
        "auto", description="of a file of records; auto: by the fields of the first"
    )
    tokenizer: str = Field("bytes", description="of a file of records: bytes, or a tokenizer.json")
    chat_template: str | None = Field(
        None,
        description="of a file of records: chatml, alpaca, or a Jinja file; None: the tokenizer's own",
    )


def show(words: Sequence[str]) -> int:
    """print what is in a prepared folder, or records with the tokens that count"""
    if wants_help(words):
        description = "print what is in a prepared folder, or records with the tokens that count"
        return show_help(ShowArguments(), f"weft data show {USAGE}", description)
    arguments, places = read_options(words, ShowArguments)
    if len(places) != 1:
        got = " ".join(places) or "nothing"
        fix = "weft data show FOLDER"
        raise UserError(Fault("weft data show", "takes one folder", got=got, fix=fix))
    prepared = prepared_of(places[0])
    if prepared is not None:
        return _show_prepared(prepared, arguments)
    path = source_files(places[0])[0] if is_url(places[0]) else Path(os.path.expanduser(places[0]))
    if path.is_file() and holds_rows(path):
        return _show_records(str(path), arguments)
    fix = "weft data prepare INPUT --out prepared, then weft data show prepared"
    need = "one with meta.json, or a file of records"
    raise DataError(
        Fault("weft data show", "is not a prepared folder", got=repr(places[0]), need=need, fix=fix)
    )


def summary(folder: str, meta: PreparedMeta) -> str:
    """Inputs, tokenizer and sizes of a prepared folder."""
    if meta.end is None:
        end = ""
    else:
        end = f"; {meta.end} ends a document"
    files = counted(meta.files, "file", spec=",")
    lines = [
        folder,
        f"  from       {', '.join(meta.inputs)}: {files}, {memory(meta.input_bytes)}",
        f"  tokenizer  {meta.tokenizer}, {meta.vocab:,} tokens, stored as {meta.dtype}{end}",
    ]
    if meta.read_as:
        lines.insert(2, f"  read as    {meta.read_as}")
    if meta.record_format != TEXT:
        lines.append(f"  format     {meta.record_format}, with a mask of answers")
    for split in SPLITS:
        info = meta.splits[split]
        documents = counted(info.documents, "document", spec=",")
        sizes = f"{count(info.tokens)} tokens in {documents}, the longest of {info.longest:,}"
        lines.append(f"  {split:<9}  {sizes}; sha256 {info.sha256[:12]}")
    return "\n".join(lines)


def _show_prepared(prepared: Prepared, arguments: ShowArguments) -> int:
    print_result(summary(str(prepared.folder), prepared.meta))
    if prepared.meta.record_format == TEXT and not arguments.samples:
        print_result(_first_document(prepared, max_tokens=arguments.tokens))
    else:
        num_samples = arguments.samples or 1
        tokenizer = prepared.tokenizer()
        is_pair = prepared.meta.record_format in GROUPED
        group = PAIR if is_pair else 1
        for number in range(num_samples):
            documents = list(_stored_documents(prepared, "train", number * group, group))
            if documents:
                scored = Scored(prepared.meta.record_format in SCORED, prepared.meta.classes)
                print_result(_record_text(number + 1, documents, tokenizer, scored))
    if arguments.verify:
        return _verify(prepared)
    return EXIT_OK


def _stored_documents(
    prepared: Prepared, split: Split, first: int, number: int
) -> Iterator[MaskedTokens]:
    """Consecutive documents of a split, from document `first` on."""
    bounds = prepared.bounds(split)
    stream = prepared.stream(split, vocab=prepared.meta.vocab)
    for document in range(first, min(first + number, len(bounds) - 1)):
        start = bounds[document]
        stop = bounds[document + 1]
        if prepared.meta.record_format == TEXT:
            mask = np.ones(stop - start, dtype=np.uint8)
        else:
            mask = prepared.mask(split)[start:stop]
        yield MaskedTokens(ids=stream.read(start, stop).tolist(), mask=mask, has_shared_token=False)


def _show_records(source: str, arguments: ShowArguments) -> int:
    tokenizer = open_tokenizer(arguments.tokenizer)
    reader = make_reader(
        arguments.format, arguments.chat_template, tokenizer, classes=arguments.classes
    )
    files = find_files(source)
    records = encode_records(files, reader, tokenizer)
    shown = islice(records, arguments.samples or 1)
    for number, record in enumerate(shown, start=1):
        scored = Scored(reader.format in SCORED, arguments.classes)
        print_result(_record_text(number, record.documents, tokenizer, scored))
    return EXIT_OK


class Scored(NamedTuple):
    """Whether the last token of each text is scored, and nothing else counts; names of classes."""

    at_end: bool
    classes: Sequence[str]


def _record_text(
    number: int, documents: Sequence[MaskedTokens], tokenizer: Tokenizer, scored: Scored
) -> str:
    """A record with the tokens that count, wrapped for a terminal."""
    in_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    names = ["chosen", "rejected"] if len(documents) == PAIR else [""]
    lines = []
    for name, document in zip(names, documents, strict=True):
        num_counting = int((document.mask[1:] > 0).sum())
        tokens = counted(len(document.ids), "token", spec=",")
        if name:
            title = f"record {number}, {name}"
        else:
            title = f"record {number}"
        what = f"{num_counting:,} count in the loss"
        if scored.at_end:
            what = "scored at the last one"
            if scored.classes:
                what = f"class {scored.classes[int(document.mask[0]) - 1]}, {what}"
            is_last = np.arange(len(document.ids)) == len(document.ids) - 1
            document = replace(document, mask=is_last.astype(np.uint8))
        lines.append(f"{title}: {tokens}, {what}")
        segments = list(_segments(document, tokenizer))
        lines.append(marked_text(segments, columns=COLUMNS, in_colour=in_colour))
    return "\n".join(lines)


def _segments(document: MaskedTokens, tokenizer: Tokenizer) -> Iterator[TextSegment]:
    """Runs of tokens that count, and of tokens that do not."""
    mask = document.mask.tolist()
    start = 0
    for counts, run in groupby(mask):
        stop = start + len(list(run))
        tokens = document.ids[start:stop]
        start = stop
        yield TextSegment(text=tokenizer.decode(tokens), counts=bool(counts))


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


def _verify(prepared: Prepared) -> int:
    damage = list(prepared.damage())
    if damage:
        print_result("\n".join(damage))
        return EXIT_FAILED
    return print_result("all files match their hashes")
