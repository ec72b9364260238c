"""Documents in files: one a text file, one a JSONL line, one a parquet row; read in chunks of bounded size."""

from __future__ import annotations

import codecs
import gzip
import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal, cast

from weft.data.files import (
    GZIP_SUFFIX,
    KEY,
    LINES_SUFFIX,
    READ_ERRORS,
    TABLE_SUFFIX,
    kind_of,
    read_fault,
)
from weft.errors import DataError, Fault, did_you_mean
from weft.small_files import MIB, UnreadableFile, capped_lines, open_regular, parse_json

FIELD_KEY = "data.text_field"
CHUNK_CHARS = 2**16
"""Characters of a chunk at most."""
READ_BYTES = 2**18
MAX_LINE_BYTES = 64 * MIB
"""Length of a JSONL line, decompressed."""
PARQUET_ROWS = 256
"""Rows of a parquet file that are read at once."""
MAX_ERROR_CHARS = 160
PARQUET_TEXT_TYPES = ("string", "large_string", "string_view")

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
    readers: dict[str, Callable[[Path, ReadOptions], Iterator[TextChunk]]] = {
        LINES_SUFFIX: _jsonl_documents,
        TABLE_SUFFIX: _parquet_documents,
    }
    reader = readers.get(kind_of(file), _text_documents)
    try:
        yield from reader(file, options)
    except UnreadableFile as error:
        why = f"{error.what}: {error.got}" if error.got else error.what
        fault = Fault(KEY, "cannot read the file", repr(str(file)), fix=f"{why}: check it")
        raise DataError(fault) from None
    except READ_ERRORS as error:
        raise DataError(read_fault(file, error)) from None


def split_text(text: str, *, limit: int = CHUNK_CHARS) -> Iterator[str]:
    """A long text in parts of at most `limit` characters, split at the start of a line if there is
    one, or before a word.

    Tokenizers that split text into words before they look for tokens (all byte-level BPE) produce
    the same tokens for the parts as for the whole: a line break before a character that is not a
    space is a word boundary for all of them, and so is the position before a space that a word
    follows.
    """
    start = 0
    while len(text) - start > limit:
        stop = _last_word_boundary(text, start, start + limit)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _last_word_boundary(text: str, start: int, stop: int) -> int:
    """The last good index to split at in (start, stop]; `stop` if there is none."""
    for separator, offset in (("\n", 1), (" ", 0)):
        index = text.rfind(separator, start + 1, stop)
        while index > start:
            if not text[index + 1].isspace():
                return index + offset
            index = text.rfind(separator, start + 1, index)
    return stop


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
    paragraph, incomplete_line, is_long = "", "", False
    for block in _decoded_blocks(file, options):
        *lines, incomplete_line = (incomplete_line + block.text).split("\n")
        is_rest = is_long and bool(lines)
        is_long = len(incomplete_line) > CHUNK_CHARS or (is_long and not lines)
        if is_long:
            lines.append(incomplete_line)
            incomplete_line = ""
        for index, line in enumerate(lines):
            is_open = is_long and index == len(lines) - 1
            if line.strip() or is_open or (is_rest and index == 0):
                paragraph += line if is_open else line + "\n"
                if len(paragraph) > 2 * CHUNK_CHARS:
                    *parts, paragraph = split_text(paragraph)
                    for part in parts:
                        yield TextChunk(part, ends=False, at=block.at)
            elif paragraph:
                yield from document_chunks(paragraph, block.at)
                paragraph = ""
    if paragraph or incomplete_line.strip():
        yield from document_chunks(paragraph + incomplete_line, file.stat().st_size)


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
    with open_regular(file) as raw, _decompressed(raw, file) as source:
        while True:
            data = source.read(READ_BYTES)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                index = num_decoded + len(data) - len(error.object) + error.start
                got = f"{error.object[error.start]:#04x} at byte {index}"
                fix = "convert the file, or use the tokenizer bytes, which accepts any bytes"
                raise DataError(Fault(KEY, f"{file} is not UTF-8 text", got, fix=fix)) from None
            num_decoded += len(data)
            if text:
                yield _DecodedBlock(text, raw.tell())
            if not data:
                return


def _decompressed(raw: IO[bytes], file: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(raw)) if file.suffix == GZIP_SUFFIX else raw


def _jsonl_documents(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    """A JSONL file: the text field of every line."""
    with open_regular(file) as raw, _decompressed(raw, file) as source:
        number = 0
        try:
            for number, line in enumerate(capped_lines(source, max_bytes=MAX_LINE_BYTES), start=1):
                if not line.strip():
                    continue
                text = _text_of_line(line, options.text_field, f"{file}:{number}")
                if text:
                    yield from document_chunks(text, raw.tell())
        except ValueError as error:
            what = f"{file}:{number + 1} is too long"
            fix = "one document a line, or plain text, which may have lines of any length"
            raise DataError(Fault(KEY, what, str(error), fix=fix)) from None


def _text_of_line(line: bytes, field: str, where: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        raise DataError(
            Fault(
                KEY,
                f"{where} is not JSON",
                got=str(error),
                need="one JSON object a line",
            )
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            Fault(
                KEY,
                f"{where} is not a JSON object",
                got=type(row).__name__,
                need='{"text": "..."}',
            )
        )
    if field not in row:
        raise DataError(
            Fault(
                FIELD_KEY,
                f"{where} has no such field",
                got=repr(field),
                fix=suggest_field(field, row),
            )
        )
    text = row[field]
    if not isinstance(text, str):
        raise DataError(
            Fault(
                FIELD_KEY,
                f"{where}: the field {field!r} is not text",
                got=type(text).__name__,
                need="text",
            )
        )
    return text.encode("utf-8", "replace").decode()  # JSON may hold half of a surrogate pair


def suggest_field(field: str, known: Any) -> str:
    """What to do about a field that is not there."""
    return (
        did_you_mean(field, map(str, known)) if known else "name another field, or repair the file"
    )


def _parquet_documents(file: Path, options: ReadOptions) -> Iterator[TextChunk]:
    """A parquet file: the text column of every row, some rows at a time."""
    parquet = _import_pyarrow()
    field = options.text_field
    with open_regular(file) as raw:
        try:
            table = parquet.ParquetFile(raw)
        except Exception as error:  # noqa: BLE001 - the library's own errors, about the file alone
            why = str(error).partition("\n")[0][:MAX_ERROR_CHARS]
            raise DataError(
                Fault(
                    KEY,
                    f"{file} is not a parquet file",
                    got=why,
                    fix="fetch the file again",
                )
            ) from None
        _check_text_column(table.schema_arrow, field, file)
        num_rows = max(table.metadata.num_rows, 1)
        file_bytes = file.stat().st_size
        num_read = 0
        _check_row_groups(table.metadata, table.schema_arrow.names.index(field), file)
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=[field]):
            _check_cells(batch.column(0), file, first_row=num_read)
            num_read += len(batch)
            at = file_bytes * num_read // num_rows
            for text in batch.column(0).to_pylist():
                if text:
                    yield from document_chunks(text, at)


def _check_row_groups(metadata: Any, column: int, file: Path) -> None:
    """Reject a file whose metadata says that some text is too long, before it is decompressed."""
    row = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        num_bytes = group.column(column).total_uncompressed_size
        if num_bytes > MAX_LINE_BYTES * max(group.num_rows, 1):
            raise DataError(_long_cell(file, row, num_bytes))
        row += group.num_rows


def _check_cells(texts: Any, file: Path, *, first_row: int) -> None:
    """Reject a text that is too long, before it becomes a Python string."""
    compute = importlib.import_module("pyarrow.compute")
    lengths = compute.binary_length(texts)
    longest = compute.max(lengths).as_py() or 0
    if longest > MAX_LINE_BYTES:
        row = first_row + compute.index(lengths, longest).as_py()
        raise DataError(_long_cell(file, row, longest))


def _long_cell(file: Path, row: int, num_bytes: int) -> Fault:
    return Fault(
        KEY,
        f"{file}: row {row + 1} holds a text that is too long",
        got=f"{num_bytes:,} bytes",
        need=f"at most {MAX_LINE_BYTES:,}",
        fix="split it into several rows",
    )


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
            )
        )


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet as parquet  # an extra, and 100 ms to import
    except ImportError:
        fix = "pip install 'weft-train[data]', or write JSONL"
        raise DataError(
            Fault(KEY, "parquet files need pyarrow, which is not installed", fix=fix)
        ) from None
    return parquet
