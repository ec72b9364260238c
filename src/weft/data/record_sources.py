"""Sources of fine-tuning records: a prepared folder with masks, or small JSONL and parquet files encoded in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from weft.config.schema import DataConfig, RecordFormat
from weft.data.chat_template import KEY as TEMPLATE_KEY
from weft.data.chat_template import ChatTemplate, find_template
from weft.data.conversations import (
    PAIR,
    Conversations,
    ConversationSamples,
    MaskedTokens,
    begin_together,
    encode_answers,
)
from weft.data.files import KEY
from weft.data.formats import format_of, guarded_read, read_as
from weft.data.prepared import (
    PREPARE_AGAIN,
    TEXT,
    Prepared,
    Split,
    agreed_tokenizer,
    prepare_command,
    prepared_of,
    sources_of,
)
from weft.data.records import UNPAIRED, AnswerText, RecordReader, RenderedRecord
from weft.data.round_trip import RoundTrip
from weft.data.row_files import file_rows, holds_rows
from weft.data.rows import FORMAT_KEY, detect_format
from weft.data.streams import source_files
from weft.data.token_sources import MAX_CHARS_IN_MEMORY, check_round_trip, check_vocab, split_of
from weft.data.tokenizer import Tokenizer, open_tokenizer
from weft.data.tokens import TokenStream
from weft.errors import DataError, Fault

AUTO = "auto"
PREFERENCE = "preference"
REWARD = "reward"
OF_PAIRS = (PREFERENCE, REWARD)
"""Formats of pairs that are compared."""
GROUPED = (*OF_PAIRS, UNPAIRED)
"""Formats whose records are two documents."""
PACKING_KEY = "data.packing"


@dataclass(frozen=True)
class EncodedRecord:
    """The documents of a record, one or the two of a pair."""

    documents: tuple[MaskedTokens, ...]
    texts: tuple[AnswerText, ...]
    where: str
    at: int
    num_chars: int


def holds_records(source: str, data: DataConfig) -> bool:
    """Whether a source is read as fine-tuning records."""
    prepared = prepared_of(source)
    if prepared is not None:
        return prepared.meta.record_format != TEXT or data.format not in (TEXT, AUTO)
    if data.format == AUTO:
        return _first_row_is_record(source, data.text_field)
    return data.format != TEXT


def packs_documents(data: DataConfig) -> bool:
    """Whether samples of token sources say which tokens are of one document. Of a source that cannot
    be read, format and packing say it.
    """
    if data.packing in ("documents", "single"):
        return True
    try:
        return holds_records(sources_of(data)[0], data)
    except DataError:
        return data.format not in (TEXT, AUTO)


def _first_row_is_record(source: str, text_field: str) -> bool:
    """Whether the first row of the source's first file is anything but text."""
    first = source_files(source)[0]
    if not holds_rows(first):
        return False
    names: list[str] = []

    def read_all_columns(schema: Any) -> None:
        names.extend(schema.names)

    with guarded_read(first):
        row = next(file_rows(first, check=read_all_columns, columns=names), None)
    if row is None:
        return True
    return detect_format(row.fields) is not None or text_field not in row.fields


def open_records(source: str, data: DataConfig, *, vocab: int, split: Split) -> ConversationSamples:
    """The records of a source as samples, for a model with `vocab` ids.

    Raises:
        DataError: missing, broken, of another format, without targets, or too large to be encoded
            in memory.
    """
    prepared = prepared_of(source)
    if prepared is not None:
        conversations = _open_prepared(source, prepared, data, vocab=vocab, split=split)
    else:
        conversations = _encode_in_memory(source, data, vocab=vocab)
    if data.packing == AUTO:
        packing = "documents"
    else:
        packing = data.packing
    if packing == "stream":
        what = "records stay whole: they are no stream of tokens"
        fix = "leave data.packing out: documents packs several into a sequence, single one"
        raise DataError(Fault(PACKING_KEY, what, got="stream", fix=fix))
    samples = ConversationSamples(
        data=conversations,
        seq_len=data.seq_len,
        source=source,
        packing=cast(Literal["documents", "single"], packing),
        order=data.order,
    )
    _check_longest(samples, data)
    return samples


def make_reader(
    record_format: str,
    template: str | None,
    tokenizer: Tokenizer,
    *,
    folder: Path | None = None,
    classes: Sequence[str] = (),
) -> RecordReader:
    """A reader of records for a tokenizer and its template; a missing template is an error only of
    records that need it.

    Args:
        folder: of the tokenizer's other files; default: that of its tokenizer.json.
        classes: names of the classes of labelled records.

    Raises:
        DataError: a template that is named cannot be read.
    """
    found: ChatTemplate | None = None
    no_template: DataError | None = None
    try:
        found = find_template(template, tokenizer, folder=folder)
    except DataError as error:
        if template is not None:
            raise
        no_template = error
    if record_format == AUTO:
        wanted = None
    else:
        wanted = cast(RecordFormat, record_format)
    end_text = tokenizer.end_text
    if found is not None:
        end_text = found.special_tokens.get("eos_token", end_text)
    return RecordReader(
        format=wanted, template=found, end_text=end_text, classes=classes, no_template=no_template
    )


def encode_records(
    files: Iterable[Path], reader: RecordReader, tokenizer: Tokenizer
) -> Iterator[EncodedRecord]:
    """The tokens and masks of all records.

    Raises:
        DataError: a record that cannot be read, or one without text.
    """
    for file in files:
        for record in reader.read(file):
            yield encode_record(record, tokenizer)


def encode_record(record: RenderedRecord, tokenizer: Tokenizer) -> EncodedRecord:
    """The tokens and masks of a record.

    Raises:
        DataError: it has no tokens.
    """
    documents = tuple(encode_answers(text, tokenizer) for text in record.texts)
    if record.is_pair:
        begin_together(documents)
    if not all(len(document.ids) for document in documents):
        fix = "remove the record"
        raise DataError(Fault(FORMAT_KEY, f"{record.where} is empty: it has no tokens", fix=fix))
    num_chars = sum(len(text.text) for text in record.texts)
    return EncodedRecord(
        documents=documents,
        texts=record.texts,
        where=record.where,
        at=record.at,
        num_chars=num_chars,
    )


def check_record(round_trip: RoundTrip, record: EncodedRecord, *, document: int) -> None:
    """Compare the texts of a record, which is number `document`, with their tokens."""
    for text, encoded in zip(record.texts, record.documents, strict=True):
        round_trip.check(text.text, encoded.ids, document=document, adds_special=text.adds_special)


def check_date(template: ChatTemplate | None, source: str, data: DataConfig) -> None:
    """Reject a template that renders today's date where tokens are made at every start.

    Raises:
        DataError: it does.
    """
    if template is not None and template.reads_date:
        what = f"{template.name} renders the date of the day, so tomorrow's tokens would be others"
        fix = prepare_command(source, data)
        raise DataError(Fault(TEMPLATE_KEY, what, got="strftime_now", fix=fix))


def _check_longest(samples: ConversationSamples, data: DataConfig) -> None:
    if data.long != "error" or not samples.table.num_cut:
        return
    bounds = samples.data.stream.document_bounds
    longest = int(np.diff(bounds[: len(bounds)]).max())
    what = f"{samples.table.num_cut} texts of {samples.source} are longer than the sequence"
    fix = f"--data.seq_len {longest * samples.data.group}, or --data.long split, which cuts them"
    need = f"at most {data.seq_len}"
    raise DataError(Fault("data.long", what, got=f"up to {longest} tokens", need=need, fix=fix))


def _open_prepared(
    source: str, prepared: Prepared, data: DataConfig, *, vocab: int, split: Split
) -> Conversations:
    stored = prepared.meta.record_format
    is_pairs = data.format in OF_PAIRS and stored in OF_PAIRS
    if data.format not in (TEXT, AUTO, stored) and not is_pairs:
        fix = f"omit data.format: the folder holds its own, {stored}"
        what = f"is not what {prepared.folder} was prepared as"
        raise DataError(Fault(FORMAT_KEY, what, got=data.format, need=stored, fix=fix))
    if data.chat_template is not None:
        what = f"{prepared.folder} was prepared with its own"
        fix = f"omit data.chat_template, or {PREPARE_AGAIN}"
        raise DataError(Fault(TEMPLATE_KEY, what, got=data.chat_template, fix=fix))
    if prepared.meta.classes != data.classes:
        stored_classes = " ".join(prepared.meta.classes)
        what = f"are not those that {prepared.folder} was prepared with"
        got = " ".join(data.classes)
        fix = f"--data.classes {stored_classes}" if stored_classes else "leave it out"
        raise DataError(Fault("data.classes", what, got=got, need=stored_classes, fix=fix))
    check_vocab(agreed_tokenizer(prepared, data), vocab)
    check_round_trip(prepared, data)
    part = split_of(source, split)
    stream = prepared.stream(part, vocab=vocab)
    if not len(stream):
        raise DataError(
            Fault(
                KEY,
                "is empty",
                got=f"0 tokens in {stream.files[0]}",
                need="some records",
                fix=PREPARE_AGAIN,
            )
        )
    return Conversations(
        stream=stream,
        mask=prepared.mask(part),
        group=PAIR if stored in GROUPED else 1,
        num_shared=prepared.meta.num_shared,
        format=data.format if is_pairs else stored,
    )


def _encode_in_memory(source: str, data: DataConfig, *, vocab: int) -> Conversations:
    tokenizer = open_tokenizer(data.tokenizer)
    check_vocab(tokenizer, vocab)
    reader = make_reader(data.format, data.chat_template, tokenizer, classes=data.classes)
    check_date(reader.template, source, data)
    files = source_files(source)
    ids: list[int] = []
    masks: list[NDArray[np.uint8]] = []
    lengths: list[int] = []
    num_shared = 0
    round_trip = RoundTrip(tokenizer)
    records = _small(encode_records(files, reader, tokenizer), source, data)
    for number, record in enumerate(records):
        if data.round_trip == "exact":
            check_record(round_trip, record, document=number)
        for document in record.documents:
            ids.extend(document.ids)
            masks.append(document.mask)
            lengths.append(len(document.ids))
            num_shared += document.has_shared_token
    round_trip.reject()
    if not ids:
        raise DataError(
            Fault(
                KEY,
                "is empty",
                got=f"no record in {source}",
                need="some records",
                fix="name a file with records",
            )
        )
    stream = TokenStream(
        files=tuple(files),
        parts=(np.array(ids, dtype=np.uint32),),
        vocab=vocab,
        documents=np.cumsum([0, *lengths], dtype=np.int64),
        read_as=read_as(source, map(format_of, files)) + reader.unread,
    )
    group = PAIR if reader.format in GROUPED else 1
    return Conversations(
        stream=stream,
        mask=np.concatenate(masks),
        group=group,
        num_shared=num_shared,
        format=reader.format or "",
    )


def _small(
    records: Iterable[EncodedRecord], source: str, data: DataConfig
) -> Iterator[EncodedRecord]:
    """The records, if they are small together.

    Raises:
        DataError: they are not.
    """
    num_chars = 0
    for record in records:
        num_chars += record.num_chars
        if num_chars > MAX_CHARS_IN_MEMORY:
            fix = prepare_command(source, data)
            got = f"more than {MAX_CHARS_IN_MEMORY:,} characters"
            need = "less, or a prepared folder"
            raise DataError(
                Fault(
                    KEY, "is too large to be tokenized at every start", got=got, need=need, fix=fix
                )
            )
        yield record
