"""Owns documents as they stand in files: a text file each, a JSONL line each, a parquet row each, in pieces of bounded size."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Literal

from weft.data.files import GZIP_SUFFIX, KEY, LINES_SUFFIX, TABLE_SUFFIX, kind_of
from weft.errors import DataError, Fault, did_you_mean

FIELD_KEY = "data.text_field"
PIECE_CHARS = 2**16
"""Characters of a piece at most."""
READ_BYTES = 2**18
ROWS = 256

SplitOn = Literal["file", "blank"]


@dataclass(frozen=True)
class Piece:
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
class Reading:
    """How files are read.

    Attributes:
        text_field: which field of a JSONL line, or column of a parquet file, is the text.
        split_on: a text file is one document, or blank lines part its documents.
        takes_any_bytes: whether bytes that are no UTF-8 pass, as they are, to who can take them (surrogateescape).
    """

    text_field: str = "text"
    split_on: SplitOn = "file"
    takes_any_bytes: bool = False


def read_documents(file: Path, reading: Reading) -> Iterator[Piece]:
    """The documents of a file, one after the other; those without text are left out.

    Raises:
        DataError: a file that cannot be read, is no such file or has no such field, with its line.
    """
    readers: dict[str, Callable[[Path, Reading], Iterator[Piece]]] = {LINES_SUFFIX: _lines, TABLE_SUFFIX: _rows}
    try:
        yield from readers.get(kind_of(file), _text)(file, reading)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(Fault(KEY, f"{file} is a broken gzip file", str(error), fix="fetch the file again")) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise DataError(Fault(KEY, "cannot read the file", repr(str(file)), fix=f"{why}: check it")) from None


def cut(text: str, *, limit: int = PIECE_CHARS) -> Iterator[str]:
    """A long text in parts of at most `limit` characters, at the start of a line if there is one, or before a word.

    Tokenizers that split text into words before they look for tokens (all byte-level BPE) make the same tokens of the
    parts as of the whole: a line break before a character that is no space is a border of words to all of them, and so is
    the place before a space that a word follows.
    """
    start = 0
    while len(text) - start > limit:
        stop = _border(text, start, start + limit)
        yield text[start:stop]
        start = stop
    yield text[start:]


def _border(text: str, start: int, stop: int) -> int:
    """The last good place to cut in (start, stop]."""
    for mark, offset in (("\n", 1), (" ", 0)):
        at = text.rfind(mark, start + 1, stop)
        while at > start:
            if not text[at + 1].isspace():
                return at + offset
            at = text.rfind(mark, start + 1, at)
    return stop


def _text(file: Path, reading: Reading) -> Iterator[Piece]:
    """A text file as one document, or as those between its blank lines."""
    if reading.split_on == "blank":
        yield from _paragraphs(file, reading)
        return
    waiting, at = "", 0
    for chunk, at in _chunks(file, reading):
        waiting += chunk
        *whole, waiting = cut(waiting)
        yield from (Piece(part, False, at) for part in whole)
    if waiting:
        yield Piece(waiting, True, at)


def _paragraphs(file: Path, reading: Reading) -> Iterator[Piece]:
    """What stands between blank lines, a document each; a line of any length, and as many of them as there are."""
    held, rest = "", ""
    for chunk, at in _chunks(file, reading):
        *lines, rest = (rest + chunk).split("\n")
        for line in lines:
            if line.strip():
                held += line + "\n"
                if len(held) > 2 * PIECE_CHARS:
                    *whole, held = cut(held)
                    yield from (Piece(part, False, at) for part in whole)
            elif held:
                yield from document(held, at)
                held = ""
    if held + rest.strip():
        yield from document(held + rest, file.stat().st_size)


def document(text: str, at: int) -> Iterator[Piece]:
    """A whole text that is in memory."""
    *whole, last = cut(text)
    yield from (Piece(part, False, at) for part in whole)
    yield Piece(last, True, at)


def _chunks(file: Path, reading: Reading) -> Iterator[tuple[str, int]]:
    """The text of a file bit by bit, line ends as they are, and how many of its bytes have been read."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape" if reading.takes_any_bytes else "strict")
    done = 0
    with file.open("rb") as raw, _unpacked(raw, file) as source:
        while True:
            block = source.read(READ_BYTES)
            try:
                text = decoder.decode(block, not block)
            except UnicodeDecodeError as error:
                place = done + len(block) - len(error.object) + error.start
                fix = "convert the file, or take the tokenizer bytes, which takes any"
                raise DataError(
                    Fault(KEY, f"{file} is no UTF-8 text", f"{error.object[error.start]:#04x} at byte {place}", fix=fix)
                ) from None
            done += len(block)
            if text:
                yield text, raw.tell()
            if not block:
                return


def _unpacked(raw: IO[bytes], file: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(raw) if file.suffix == GZIP_SUFFIX else raw


def _lines(file: Path, reading: Reading) -> Iterator[Piece]:
    """A JSONL file: the text field of every line."""
    with file.open("rb") as raw, _unpacked(raw, file) as source:
        for number, line in enumerate(source, start=1):
            if not line.strip():
                continue
            if text := _text_of(line, reading.text_field, f"{file}:{number}"):
                yield from document(text, raw.tell())


def _text_of(line: bytes, field: str, where: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(Fault(KEY, f"{where} is no JSON", str(error), "one JSON object a line")) from None
    if not isinstance(row, dict):
        raise DataError(Fault(KEY, f"{where} is no JSON object", type(row).__name__, '{"text": "..."}'))
    if field not in row:
        raise DataError(Fault(FIELD_KEY, f"{where} has no such field", repr(field), fix=other_field(field, row)))
    if not isinstance(row[field], str):
        raise DataError(Fault(FIELD_KEY, f"{where}: the field {field!r} is no text", type(row[field]).__name__, "text"))
    return str(row[field]).encode("utf-8", "replace").decode()  # JSON may spell half a character


def other_field(field: str, known: Any) -> str:
    """What to do about a field that is not there."""
    return did_you_mean(field, map(str, known)) if known else "name another, or mend the file"


def _rows(file: Path, reading: Reading) -> Iterator[Piece]:
    """A parquet file: the text column of every row, some rows at a time."""
    parquet = _pyarrow()
    with file.open("rb") as raw:
        try:
            table = parquet.ParquetFile(raw)
        except Exception as error:  # noqa: BLE001 - the library's own errors, about the file alone
            why = str(error).partition("\n")[0][:160]
            raise DataError(Fault(KEY, f"{file} is no parquet file", why, fix="fetch the file again")) from None
        names, field = table.schema_arrow.names, reading.text_field
        if field not in names:
            got, need = repr(field), f"one of {', '.join(names)}"
            raise DataError(Fault(FIELD_KEY, f"{file} has no such column", got, need, other_field(field, names)))
        if str(table.schema_arrow.field(field).type) not in ("string", "large_string", "string_view"):
            kind = str(table.schema_arrow.field(field).type)
            raise DataError(Fault(FIELD_KEY, f"{file}: the column {field!r} is no text", kind, "strings"))
        done, total, size = 0, max(table.metadata.num_rows, 1), file.stat().st_size
        for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
            done += len(batch)
            for text in batch.column(0).to_pylist():
                if text:
                    yield from document(text, size * done // total)


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet as parquet  # an extra, and 100 ms to import
    except ImportError:
        fix = "pip install 'weft-train[data]', or write JSONL"
        raise DataError(Fault(KEY, "parquet files need pyarrow, which is not installed", fix=fix)) from None
    return parquet
