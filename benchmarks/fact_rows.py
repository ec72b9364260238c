"""Rows of a file of published measurements, checked: sections that are there, numbers that are numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SECTIONS = ("model", "hardware", "layout", "measured", "derived")
TEXTS = ("id", "kind", "source")
DEFAULTS: Mapping[str, Any] = {
    "dtype": None,
    "micro_batch": None,
    "global_batch": None,
    "derived": {},
}
"""Of fields that a row may leave out."""
NUMBERS: Mapping[str, Sequence[str]] = {
    "model": ("hidden", "heads", "kv_heads", "head_dim", "ffn", "seq", "layers", "vocab"),
    "hardware": ("count", "gpus_per_node"),
    "layout": ("dp", "tp", "pp", "cp", "vpp"),
    "measured": ("iteration_s", "tokens_per_s_per_gpu"),
    "derived": ("iteration_s", "tokens_per_s_per_gpu"),
}
"""Numbers above 0, or null where the source does not print them."""
BATCHES = ("micro_batch", "global_batch")
COLUMNS = 11
"""Of `vtrain_single.csv`: ten whole numbers, and milliseconds."""


class RowError(Exception):
    """A file of rows, or a row of it, that is not as `fact_rows` describes; one line for each fault."""


def read_json_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON file.

    Raises:
        RowError: the file cannot be read, or rows lack sections or have wrong types.
    """
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RowError(f"{path}: {error}") from None
    if not isinstance(rows, list):
        raise RowError(f"{path}: {type(rows).__name__} (need a list of rows)")
    found: list[dict[str, Any]] = []
    faults: list[str] = []
    for number, row in enumerate(rows, start=1):
        name = f"{path.name} row {number}"
        if not isinstance(row, dict):
            faults.append(f"{name}: {type(row).__name__} (need a table)")
            continue
        whole = {**DEFAULTS, **row}
        found.append(whole)
        identity = row.get("id")
        for fault in row_faults(whole):
            faults.append(f"{name} (id {identity}): {fault}")
    if faults:
        raise RowError("\n".join(faults))
    return found


def row_faults(row: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong in a row: the field, what it has and what it needs."""
    for name in TEXTS:
        if not isinstance(row.get(name), str):
            yield f"{name}: {row.get(name)!r} (need a text)"
    dtype = row["dtype"]
    if dtype is not None and not isinstance(dtype, str):
        yield f"dtype: {dtype!r} (need a text, or null)"
    for name in BATCHES:
        yield from _number_faults(name, row.get(name))
    for section in SECTIONS:
        fields = row.get(section)
        if not isinstance(fields, dict):
            yield f"{section}: {fields!r} (need a table)"
            continue
        for name in NUMBERS[section]:
            yield from _number_faults(f"{section}.{name}", fields.get(name))


def _number_faults(name: str, value: object) -> Iterator[str]:
    if value is None:
        return
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not value > 0:  # type: ignore[operator]
        yield f"{name}: {value!r} (need a number above 0, or null)"


def read_csv_rows(path: Path) -> list[list[str]]:
    """The rows of a file of steps on one node, without its head line.

    Raises:
        RowError: a row has another number of columns, or something else than numbers.
    """
    with path.open(encoding="utf-8") as file:
        rows = list(csv.reader(file))[1:]
    faults = []
    for number, values in enumerate(rows, start=2):
        name = f"{path.name} line {number}"
        if len(values) != COLUMNS:
            faults.append(f"{name}: {len(values)} columns (need {COLUMNS})")
            continue
        is_whole = all(value.strip().isdigit() and int(value) > 0 for value in values[:10])
        if not is_whole or not _is_time(values[10]):
            faults.append(f"{name}: {','.join(values)} (need ten whole numbers and milliseconds)")
    if faults:
        raise RowError("\n".join(faults))
    return rows


def _is_time(text: str) -> bool:
    try:
        return float(text) > 0
    except ValueError:
        return False
