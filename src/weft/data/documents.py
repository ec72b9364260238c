"""Documents in files: one a text file, one a row of JSON, CSV or parquet; read in chunks of bounded size."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from weft.data.files import KEY
from weft.data.formats import format_of, guarded_read, open_content
from weft.data.row_files import file_rows, holds_rows
from weft.data.rows import FORMAT_KEY, PARQUET_TEXT_TYPES, Row, detect_format
from weft.errors import DataError, Fault, did_you_mean

FIELD_KEY = "data.text_field"
CHUNK_CHARS = 2**16
"""Characters of a chunk at most."""
READ_BYTES = 2**18

SplitOn = Literal["file", "blank"]


@dataclass(frozen=True)
class TextChunk:
    """A part of a document.

    Attributes:
        text: its text.
        ends: whether it is the last one of its document.
        at: bytes of the file read so far.
    """

    text: str
    ends: bool
    at: int


@dataclass(frozen=True)
class ReadOptions:
    """How files are read.

    Attributes:
        text_field: the field of a JSONL line, or column of a parquet file, that is the text.
        split_on: a text file is one document, or blank lines separate its documents.
        allow_any_bytes: whether bytes that are not UTF-8 pass unchanged (surrogateescape), for the
            byte tokenizer.
    """

    text_field: str = "text"
    split_on: SplitOn = "file"
    allow_any_bytes: bool = False


def read_documents(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    """The documents of a file, one after the other; those without text are left out.

    Raises:
        DataError: a file that cannot be read, has another format or has no such field, with its
            line.
    """
    reader = _row_documents if holds_rows(file) else _text_documents
    with guarded_read(file):
        yield from reader(file, options)


def split_text(text: str, *, limit: int = CHUNK_CHARS) -> Iterator[str]:
    """A long text in parts of at most `limit` characters, split at the start of a line if there is
    one, or before a word.

    Tokenizers that split text into words before they look for tokens (all byte-level BPE) produce
    the same tokens for the parts as for the whole: a line break between two characters that are no
    white space is a word boundary for all of them, and so is the position before a space that a
    word follows.
    """
    start = 0
    while len(text) - start > limit:
        stop = _last_word_boundary(text, start, start + limit)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _last_word_boundary(text: str, start: int, stop: int) -> int:
    """The last good index to split at in (start, stop]; `stop` if there is none."""
    blank_line = 0
    index = text.rfind("\n", start + 1, stop)
    while index > start:
        if not text[index + 1].isspace():
            if not text[index - 1].isspace():
                return index + 1
            # GPT-2's words end before the last white space of a run, others' behind a line break
            blank_line = blank_line or index + 1
        index = text.rfind("\n", start + 1, index)
    index = text.rfind(" ", start + 1, stop)
    while index > start:
        if not text[index + 1].isspace():
            return index
        index = text.rfind(" ", start + 1, index)
    return blank_line or stop


def document_chunks(text: str, at: int) -> Iterator[TextChunk]:
    """The chunks of a whole document that is in memory."""
    *parts, last = split_text(text)
    for part in parts:
        yield TextChunk(part, ends=False, at=at)
    yield TextChunk(last, ends=True, at=at)


def _text_documents(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    """A text file as one document, or as those between its blank lines."""
    if options.split_on == "blank":
        yield from _paragraphs(file, options)
        return
    pending, at = "", 0
    for block in _decoded_blocks(file, options):
        at = block.at
        *parts, pending = split_text(pending + block.text)
        for part in parts:
            yield TextChunk(part, ends=False, at=at)
    if pending:
        yield TextChunk(pending, ends=True, at=at)


def _paragraphs(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    """The texts between blank lines, a document each; lines and documents may have any length.

    A line longer than a chunk counts as text, blank or not, and is not kept until its end.
    """
    paragraph = ""
    incomplete_line = ""
    is_long = False  # the incomplete line began before the block, and its beginning is yielded
    for block in _decoded_blocks(file, options):
        text = incomplete_line + block.text
        *lines, incomplete_line = text.split("\n")
        ends_long_line = is_long and bool(lines)
        continues_long_line = is_long and not lines
        is_long = continues_long_line or len(incomplete_line) > CHUNK_CHARS
        if is_long:
            lines.append(incomplete_line)
            incomplete_line = ""
        last = len(lines) - 1
        for index, line in enumerate(lines):
            is_open = is_long and index == last
            is_rest = ends_long_line and index == 0
            if line.strip() or is_open or is_rest:
                paragraph += line
                if not is_open:
                    paragraph += "\n"
                if len(paragraph) > 2 * CHUNK_CHARS:
                    *parts, paragraph = split_text(paragraph)
                    for part in parts:
                        yield TextChunk(part, ends=False, at=block.at)
            elif paragraph:
                yield from document_chunks(paragraph, block.at)
                paragraph = ""
    if paragraph or incomplete_line.strip():
        num_bytes = file.stat().st_size
        yield from document_chunks(paragraph + incomplete_line, num_bytes)


@dataclass(frozen=True)
class _DecodedBlock:
    """Decoded text, and how many bytes of the file have been read."""

    text: str
    at: int


def _decoded_blocks(file: Path, options: ReadOptions) -> Iterator[_DecodedBlock]:
    """The text of a file block by block, line ends unchanged."""
    errors = "surrogateescape" if options.allow_any_bytes else "strict"
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    num_decoded = 0
    with open_content(file) as source:
        while True:
            data = source.content.read(READ_BYTES)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                index = num_decoded + len(data) - len(error.object) + error.start
                got = f"{error.object[error.start]:#04x} at byte {index}"
                fix = "convert the file, or use the tokenizer bytes, which accepts any bytes"
                raise DataError(Fault(KEY, f"{file} is not UTF-8 text", got=got, fix=fix)) from None
            num_decoded += len(data)
            if text:
                yield _DecodedBlock(text, source.at)
            if not data:
                return


def _row_documents(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    """A file of rows: the text field of each."""
    check = partial(_check_text_column, field=options.text_field, file=file)
    rows = file_rows(file, check=check, columns=(options.text_field,))
    yield from documents_of_rows(rows, options, has_nulls=format_of(file).kind == "parquet")


def documents_of_rows(
    rows: Iterable[Row], options: ReadOptions, *, has_nulls: bool = True
) -> Iterator[TextChunk]:
    """The text field of each row; rows with an empty one are left out, and where there may be some,
    those with None.

    Raises:
        DataError: a row has no such field, or no text in it.
    """
    field = options.text_field
    for row in rows:
        if has_nulls and field in row.fields and row.fields[field] is None:
            continue
        text = _text_of_row(row, field)
        if text:
            yield from document_chunks(text, row.at)


def _text_of_row(row: Row, field: str) -> str:
    if field not in row.fields:
        what = f"{row.where} has no such field"
        record_format = detect_format(row.fields)
        fix = suggest_field(field, row.fields)
        if record_format is not None:
            fix = f"--{FORMAT_KEY} {record_format}, as these are records to fine-tune on"
        raise DataError(Fault(FIELD_KEY, what, got=repr(field), fix=fix))
    text = row.fields[field]
    if not isinstance(text, str):
        what = f"{row.where}: the field {field!r} is not text"
        raise DataError(
            Fault(
                FIELD_KEY,
                what,
                got=type(text).__name__,
                need="text",
                fix="name a field that holds text",
            )
        )
    return without_surrogates(text)


def without_surrogates(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which JSON may hold."""
    return text.encode("utf-8", "replace").decode()


def suggest_field(field: str, known: Any) -> str:
    """What to do about a field that is not there."""
    if known:
        return did_you_mean(field, map(str, known))
    return "name another field, or repair the file"


def _check_text_column(schema: Any, field: str, file: Path) -> None:
    names = schema.names
    if field not in names:
        need = f"one of {', '.join(names)}"
        raise DataError(
            Fault(
                FIELD_KEY,
                f"{file} has no such column",
                got=repr(field),
                need=need,
                fix=suggest_field(field, names),
            )
        )
    kind = str(schema.field(field).type)
    if kind not in PARQUET_TEXT_TYPES:
        raise DataError(
            Fault(
                FIELD_KEY,
                f"{file}: the column {field!r} is not text",
                got=kind,
                need="strings",
                fix="name a column of strings",
            )
        )
