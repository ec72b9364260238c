"""Rows of any file that holds some: JSON lines, a JSON array, CSV, TSV, parquet."""

from __future__ import annotations

import codecs
import csv
import json
import re
import tarfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO, Any, Self

from weft.data.files import KEY
from weft.data.formats import Kind, format_of, open_content
from weft.data.rows import MAX_LINE_BYTES, Row, jsonl_rows, parquet_rows, parse_object
from weft.errors import DataError, Fault
from weft.small_files import capped_lines, parse_json

BLOCK_BYTES = 2**18
DELIMITERS: dict[Kind, str] = {"csv": ",", "tsv": "\t"}
ROW_KINDS: tuple[Kind, ...] = ("json_lines", "json_array", "csv", "tsv", "parquet", "tar")
NOT_SPACE = re.compile(r"\S")
FIX = "repair or remove the row"
MORE_TEXT = "more text stands behind the array"
BROKEN_HEADERS = (
    tarfile.InvalidHeaderError,  # type: ignore[attr-defined]  # typeshed leaves it out
    tarfile.TruncatedHeaderError,  # type: ignore[attr-defined]
)


def holds_rows(file: Path) -> bool:
    """Whether a file holds rows, not text or tokens.

    Raises:
        DataError: as `format_of`.
    """
    return format_of(file).kind in ROW_KINDS


def file_rows(
    file: Path, *, check: Callable[[Any], None], columns: Collection[str]
) -> Iterator[Row]:
    """The rows of a file.

    Args:
        check: of the Arrow schema of a parquet file, see `parquet_rows`.
        columns: that are read of a parquet file.

    Raises:
        DataError: a file that cannot be read, with its line or row.
    """
    kind = format_of(file).kind
    if kind == "json_lines":
        return jsonl_rows(file)
    if kind == "json_array":
        return array_rows(file)
    if kind == "tar":
        return tar_rows(file)
    if kind == "parquet":
        return parquet_rows(file, check=check, columns=columns)
    return delimited_rows(file, DELIMITERS[kind])


def tar_rows(file: Path) -> Iterator[Row]:
    """The samples of a tar in the way of WebDataset: consecutive files of one name up to its first dot
    are a row. `KEY.json` holds fields, `KEY.txt` the field text, `KEY.NAME.txt` and `KEY.NAME.json`
    the field NAME; others, such as images, are left out.

    Raises:
        DataError: a broken archive; a file that is too long, no JSON or no UTF-8.
    """
    with open_content(file) as source:
        key, fields = "", dict[str, Any]()
        try:
            # a stream: members are read one after the other, and nothing is extracted
            with tarfile.open(fileobj=source.content, mode="r|", tarinfo=_ArchiveMember) as archive:
                for member in archive:
                    folder, _, name = member.name.rpartition("/")
                    stem, _, suffix = name.partition(".")
                    if not member.isfile() or not stem:
                        continue
                    own_key = f"{folder}/{stem}"
                    # files of a sample follow each other: a stream cannot look for later ones
                    if own_key != key and fields:
                        yield Row(fields=fields, where=f"{file}:{key}", at=source.at)
                        fields = {}
                    key = own_key
                    fields |= _member_fields(archive, member, suffix, where=f"{file}:{member.name}")
        except tarfile.TarError as error:
            what = f"{file} is a broken tar"
            fault = Fault(KEY, what, got=str(error), fix="fetch the file again")
            raise DataError(fault) from None
        if fields:
            yield Row(fields=fields, where=f"{file}:{key}", at=source.at)


class _ArchiveMember(tarfile.TarInfo):
    """A file of a tar. A broken header is an error wherever it stands: `tarfile` takes all but the
    first for the end of the archive.
    """

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> Self:
        """The next one.

        Raises:
            ReadError: its header is broken, or cut.
        """
        try:
            return super().fromtarfile(archive)
        except BROKEN_HEADERS as error:
            raise tarfile.ReadError(str(error)) from None


def _member_fields(
    archive: tarfile.TarFile, member: tarfile.TarInfo, suffix: str, *, where: str
) -> dict[str, Any]:
    """The fields that a file of a sample holds; none of a file that is neither text nor JSON."""
    name, _, kind = suffix.lower().rpartition(".")
    if kind not in ("json", "txt"):
        return {}
    if member.size > MAX_LINE_BYTES:
        what, got = f"{where} is too long", f"{member.size:,} bytes"
        raise DataError(Fault(KEY, what, got=got, need=f"at most {MAX_LINE_BYTES:,}", fix=FIX))
    content = archive.extractfile(member)
    assert content is not None, "the member is a file"
    data = content.read()
    if kind == "json" and not name:
        return parse_object(data, where)
    try:
        return {name or "text": parse_json(data) if kind == "json" else data.decode()}
    except ValueError as error:
        what = f"{where} is no {'JSON' if kind == 'json' else 'UTF-8 text'}"
        raise DataError(Fault(KEY, what, got=str(error), fix=FIX)) from None


def delimited_rows(file: Path, delimiter: str) -> Iterator[Row]:
    """The rows of a CSV or TSV file (RFC 4180), whose first line names the columns.

    Raises:
        DataError: no such file, a row with other columns, or no UTF-8.
    """
    csv.field_size_limit(MAX_LINE_BYTES)  # of the process; no other code reads CSV
    with open_content(file) as source:
        lines = (line.decode() for line in capped_lines(source.content, max_bytes=MAX_LINE_BYTES))
        reader = csv.DictReader(lines, delimiter=delimiter, strict=True)
        try:
            for fields in reader:
                where = f"{file}:{reader.line_num}"
                if None in fields or None in fields.values():
                    what = f"{where} has other columns than the first line"
                    got = "more cells" if None in fields else "fewer cells"
                    need = f"{len(reader.fieldnames or ())} cells"
                    raise DataError(Fault(KEY, what, got=got, need=need, fix=FIX))
                yield Row(fields=fields, where=where, at=source.at)
        except (csv.Error, ValueError) as error:
            what = f"{file}:{reader.line_num + 1} cannot be read"
            raise DataError(Fault(KEY, what, got=str(error), fix=FIX)) from None


def array_rows(file: Path) -> Iterator[Row]:
    """The objects of a JSON array, which may be larger than memory; one at a time is kept.

    Raises:
        DataError: an item that is no object, or is too long; text that is no array.
    """
    with open_content(file) as source:
        items = _array_items(source.content)
        number = 0
        try:
            for number, item in enumerate(items, start=1):
                where = f"{file} item {number}"
                yield Row(fields=parse_object(item, where), where=where, at=source.at)
        except ValueError as error:
            what = f"{file} is no JSON array of objects, after item {number}"
            raise DataError(Fault(KEY, what, got=str(error), fix="repair the file")) from None


def _array_items(content: IO[bytes]) -> Iterator[bytes]:
    """The texts of the objects in a JSON array.

    Raises:
        ValueError: it is none.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    text, place, num_read = "", 0, BLOCK_BYTES
    before = "["  # stands before the next item
    while True:
        try:
            item = _next_item(text, place, before)
        except json.JSONDecodeError:  # the item may go on in the next block
            block = content.read(num_read)
            if not block or len(text) - place > MAX_LINE_BYTES:
                raise
            text, place = text[place:] + decoder.decode(block), 0
            # what was read is parsed again each time: by blocks of equal size a long item would take quadratic time
            num_read *= 2
            continue
        if item is None:
            _check_nothing_behind(content, decoder)
            return
        yield text[slice(*item)].encode()
        place, before, num_read = item[1], ",", BLOCK_BYTES


def _check_nothing_behind(content: IO[bytes], decoder: codecs.IncrementalDecoder) -> None:
    """The blocks behind the one in which an array ends are white space.

    Raises:
        ValueError: they are not.
    """
    is_end = False
    while not is_end:
        block = content.read(BLOCK_BYTES)
        is_end = not block
        if decoder.decode(block, is_end).strip():
            raise ValueError(MORE_TEXT)


def _next_item(text: str, place: int, before: str) -> tuple[int, int] | None:
    """Where the next object of an array starts and stops; None at the end of the array.

    Raises:
        ValueError: it is no object; a `JSONDecodeError` where it is not complete.
    """
    place = _skip_space(text, place)
    is_end = before == "," and text[place] == "]"
    if not is_end and text[place] != before:
        raise ValueError(f"{text[place]!r} in place of {before!r}")
    if not is_end:
        place = _skip_space(text, place + 1)
        is_end = before == "[" and text[place] == "]"
    if is_end:
        if text[place + 1 :].strip():
            raise ValueError(MORE_TEXT)
        return None
    if text[place] != "{":
        raise ValueError(f"{text[place]!r} in place of an object")
    try:
        _, stop = json.JSONDecoder().raw_decode(text, place)
    except RecursionError:
        raise ValueError("an object is nested too deeply") from None
    return place, stop


def _skip_space(text: str, place: int) -> int:
    """The next place that is no white space.

    Raises:
        JSONDecodeError: the text ends before.
    """
    match = NOT_SPACE.search(text, place)
    if match is None:
        raise json.JSONDecodeError("the array does not end", text, place)
    return match.start()
