"""Rows of JSONL and parquet files as dictionaries, one after the other, each with its place for messages."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.data.files import KEY
from weft.data.formats import open_content
from weft.errors import DataError, Fault, first_line
from weft.small_files import MIB, capped_lines, open_regular, parse_json

MAX_LINE_BYTES = 64 * MIB
"""Length of a JSONL line, decompressed."""
PARQUET_ROWS = 256
"""Rows of a parquet file that are read at once."""
MAX_ERROR_CHARS = 160
PARQUET_TEXT_TYPES = ("string", "large_string", "string_view")
FORMAT_KEY = "data.format"
RECORD_FIELDS: Mapping[str, tuple[str, ...]] = {
    "chat": ("messages",),
    "instruction": ("instruction", "output"),
    "preference": ("chosen", "rejected"),
    "prompt": ("prompt", "completion"),
    "reward": ("chosen", "rejected"),
    "classify": ("label",),
    "unpaired": ("prompt", "completion", "label"),
}
"""Formats of fine-tuning records, and the fields that each record of a format has."""
NAMED_ONLY = ("reward", "classify", "unpaired")
"""Formats that are not found by the fields of a record: others have these fields, too."""
OTHER_NAMES: Mapping[str, str] = {"conversations": "messages"}
"""Names that other tools give to these fields."""


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        fields: its values by name.
        where: file and line or row, for messages.
        at: bytes of the file read so far.
    """

    fields: Mapping[str, Any]
    where: str
    at: int


def detect_format(names: Collection[str]) -> str | None:
    """The format of a fine-tuning record with fields of these names; None for any other row."""
    known = {OTHER_NAMES.get(name, name) for name in names}
    for format_name, needed in RECORD_FIELDS.items():
        if format_name not in NAMED_ONLY and known.issuperset(needed):
            return format_name
    return None


def jsonl_rows(file: Path) -> Iterator[Row]:
    """The objects of a JSONL file, one a line; blank lines are left out.

    Raises:
        DataError: a line that is too long, no JSON, or no object.
    """
    with open_content(file) as source:
        number = 0
        lines = capped_lines(source.content, max_bytes=MAX_LINE_BYTES)
        try:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    continue
                where = f"{file}:{number}"
                yield Row(fields=parse_object(line, where), where=where, at=source.at)
        except ValueError as error:
            what = f"{file}:{number + 1} is too long"
            fix = "one document a line, or plain text, which may have lines of any length"
            raise DataError(Fault(KEY, what, got=str(error), fix=fix)) from None


def parquet_rows(
    file: Path, *, check: Callable[[Any], None], columns: Collection[str]
) -> Iterator[Row]:
    """The rows of a parquet file, some read at a time.

    Args:
        check: called with the Arrow schema before any row is read; raises where it does not fit.
        columns: that are read, where the file has them.

    Raises:
        DataError: no parquet file, or `pyarrow` is not installed.
    """
    parquet = _import_pyarrow()
    with open_regular(file) as raw:
        try:
            table = parquet.ParquetFile(raw)
        except Exception as error:  # noqa: BLE001 - the library's own errors, about the file alone
            why = first_line(error)[:MAX_ERROR_CHARS]
            what = f"{file} is not a parquet file"
            raise DataError(Fault(KEY, what, got=why, fix="fetch the file again")) from None
        check(table.schema_arrow)
        read_columns = [name for name in table.schema_arrow.names if name in columns]
        num_rows = max(table.metadata.num_rows, 1)
        file_bytes = file.stat().st_size
        num_read = 0
        _check_row_groups(table.metadata, read_columns, file)
        for batch in table.iter_batches(batch_size=PARQUET_ROWS, columns=read_columns):
            for values in batch.columns:
                _check_cells(values, file, first_row=num_read)
            for fields in batch.to_pylist():
                num_read += 1
                at = file_bytes * num_read // num_rows
                yield Row(fields=fields, where=f"{file} row {num_read}", at=at)


def _check_row_groups(metadata: Any, columns: Collection[str], file: Path) -> None:
    """Reject a file whose metadata says that some value is too long, before it is decompressed."""
    row = 0
    for index in range(metadata.num_row_groups):
        group = metadata.row_group(index)
        for number in range(group.num_columns):
            column = group.column(number)
            name = column.path_in_schema.partition(".")[0]
            num_bytes = column.total_uncompressed_size
            if name in columns and num_bytes > MAX_LINE_BYTES * max(group.num_rows, 1):
                raise DataError(_long_cell(file, row, num_bytes))
        row += group.num_rows


def _check_cells(values: Any, file: Path, *, first_row: int) -> None:
    """Reject a text that is too long, before it becomes a Python string; of lists their sum."""
    if str(values.type) not in PARQUET_TEXT_TYPES:
        most_bytes = MAX_LINE_BYTES * max(len(values), 1)
        if values.nbytes > most_bytes:
            raise DataError(_long_cell(file, first_row, values.nbytes))
        return
    compute = importlib.import_module("pyarrow.compute")
    lengths = compute.binary_length(values)
    longest = compute.max(lengths).as_py() or 0
    if longest > MAX_LINE_BYTES:
        index = compute.index(lengths, longest).as_py()
        raise DataError(_long_cell(file, first_row + index, longest))


def _long_cell(file: Path, row: int, num_bytes: int) -> Fault:
    return Fault(
        KEY,
        f"{file}: row {row + 1} holds a text that is too long",
        got=f"{num_bytes:,} bytes",
        need=f"at most {MAX_LINE_BYTES:,}",
        fix="split it into several rows",
    )


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """A row of JSON.

    Raises:
        DataError: it is no object.
    """
    try:
        row = parse_json(line)
    except ValueError as error:
        what = f"{where} is not JSON"
        need = "one JSON object a line"
        raise DataError(
            Fault(KEY, what, got=str(error), need=need, fix="repair or remove the line")
        ) from None
    if not isinstance(row, dict):
        what = f"{where} is not a JSON object"
        raise DataError(
            Fault(
                KEY,
                what,
                got=type(row).__name__,
                need='{"text": "..."}',
                fix="repair or remove the line",
            )
        )
    return row


def _import_pyarrow() -> Any:
    try:
        import pyarrow.parquet as parquet  # an extra, and 100 ms to import
    except ImportError:
        fix = "pip install 'weft-train[data]', or write JSONL"
        raise DataError(
            Fault(KEY, "parquet files need pyarrow, which is not installed", fix=fix)
        ) from None
    return parquet
