"""The tensors of a Hugging Face folder: index and headers of safetensors files. No torch.

A safetensors file is | length of the header, 8 bytes, little-endian | header, JSON | data |; the header has for each
tensor its dtype, shape and the bytes of the data where it lies.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard

from weft.errors import CheckpointError, Fault, counted
from weft.small_files import MIB, UnreadableFile, open_regular, parse_json, read_json_object

SINGLE_FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
}
"""safetensors' name of a type that parameters may have -> torch's, bytes of one entry."""
INTEGERS: Mapping[str, tuple[str, int]] = {"I64": ("int64", 8), "I32": ("int32", 4)}
"""The same of tables of whole numbers."""
STORED_DTYPES = {**DTYPES, **INTEGERS}
MAX_HEADER_BYTES = 25_000_000
"""The limit of the Hugging Face hub's reader; safetensors' own is 100 MB."""
MAX_INDEX_BYTES = 32 * MIB
MAX_CONFIG_BYTES = 4 * MIB
MAX_DIMS = 16
"""Dims of a stored tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: type as safetensors names it, and its bytes `start` to `stop` of the file.

    Attributes:
        swapped: two dims that lie in the other order in the file.
    """

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int
    swapped: tuple[int, int] | None = None

    def transposed(self, first: int, second: int) -> TensorEntry:
        """The tensor with two dims swapped, read from the same bytes."""
        shape = list(self.shape)
        shape[first], shape[second] = shape[second], shape[first]
        return replace(self, shape=tuple(shape), swapped=(first, second))


def list_tensors(folder: Path) -> dict[str, TensorEntry]:
    """All tensors of a folder by name, in the order of the files.

    Raises:
        CheckpointError: no weights, a missing or damaged file, a tensor in two files or not in the
            file of the index.
    """
    file_of = _read_index(folder)
    files = dict.fromkeys(file_of.values()) or [SINGLE_FILE]
    found: dict[str, TensorEntry] = {}
    for file in files:
        for name, entry in read_header(folder / file, within=folder).items():
            if name in found:
                raise CheckpointError(
                    Fault(
                        str(entry.file),
                        f"{name} stands in {found[name].file.name} too",
                        fix="remove the file that does not belong to the model",
                    )
                )
            found[name] = entry
    for name, file in file_of.items():
        if name not in found or found[name].file.name != file:
            fix = "download the folder again: a file is not the one that the index was written for"
            raise CheckpointError(Fault(str(folder / INDEX), f"{name} is not in {file}", fix=fix))
    return found


def _read_index(folder: Path) -> dict[str, str]:
    """Tensor -> file, as the index says; empty where there is one file without an index."""
    if not folder.is_dir():
        raise CheckpointError(
            Fault(
                str(folder),
                "no such folder",
                need="a folder with config.json and safetensors",
                fix="check the path",
            )
        )
    index = folder / INDEX
    if not index.exists():
        _check_single_file(folder)
        return {}
    file_of = read_json(index, max_bytes=MAX_INDEX_BYTES).get("weight_map")
    if not _is_weight_map(file_of):
        raise CheckpointError(
            Fault(
                str(index),
                "has no weight_map of tensor names and file names",
                fix="download the folder again",
            )
        )
    files = set(file_of.values())
    missing = sorted(file for file in files if not (folder / file).exists())
    if missing:
        got = f"{len(missing)} of {len(files)} files are missing"
        fix = "download the folder again, with all files"
        raise CheckpointError(Fault(str(folder / missing[0]), "missing shard", got=got, fix=fix))
    return file_of


def _check_single_file(folder: Path) -> None:
    if (folder / SINGLE_FILE).exists():
        return
    is_pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
    fix = (
        "save it as safetensors: model.save_pretrained(folder) in transformers"
        if is_pickled
        else ""
    )
    need = f"{SINGLE_FILE}, or {INDEX} and its files"
    raise CheckpointError(Fault(str(folder), "holds no weights", need=need, fix=fix))


def _is_weight_map(value: Any) -> TypeGuard[dict[str, str]]:
    """Whether it maps names to files of the same folder."""
    if not isinstance(value, dict):
        return False
    for file in value.values():
        if not isinstance(file, str) or not _is_file_name(file):
            return False
    return bool(value)


def _is_file_name(text: str) -> bool:
    return text not in ("", ".", "..") and "/" not in text and "\0" not in text


def read_header(path: Path, *, within: Path | None = None) -> dict[str, TensorEntry]:
    """The tensors of one safetensors file.

    Args:
        within: the folder that the file must lie in; None: its own.

    Raises:
        CheckpointError: it is none, or is cut short, or tensors share bytes.
    """
    try:
        with open_regular(path, within=within or path.parent) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise CheckpointError(
                    Fault(
                        str(path),
                        "is no safetensors file, or cut short",
                        got=counted(size, "byte"),
                        fix="download the file again",
                    )
                )
            header = parse_json(file.read(length))
        entries = _parse_header(path, header, data_start=8 + length)
    except UnreadableFile as error:
        raise CheckpointError(error.fault()) from None
    except OSError as error:
        raise CheckpointError(
            Fault(
                str(path),
                "cannot be read",
                got=error.strerror or str(error),
                fix="check the rights of the file",
            )
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            Fault(
                str(path),
                "is no safetensors file: its header cannot be read",
                fix="download the file again",
            )
        ) from error
    for name, entry in entries.items():
        _check_entry(name, entry, size)
    _check_overlap(entries)
    return entries


def read_json(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """A JSON file of a folder that holds an object; a link must stay in the folder.

    Raises:
        CheckpointError: it is missing or no such file.
    """
    try:
        return read_json_object(path, max_bytes=max_bytes, within=path.parent)
    except UnreadableFile as error:
        fix = "name a folder that transformers has saved" if error.is_missing else ""
        raise CheckpointError(error.fault(fix=fix)) from None


def _parse_header(path: Path, header: Any, *, data_start: int) -> dict[str, TensorEntry]:
    entries = {}
    for name, fields in header.items():
        if name == "__metadata__":
            continue
        start, stop = _whole_numbers(fields["data_offsets"])
        shape = _whole_numbers(fields["shape"])
        if len(shape) > MAX_DIMS or not isinstance(fields["dtype"], str):
            raise ValueError(f"{name}: {len(shape)} dims of {fields['dtype']!r}")
        entries[name] = TensorEntry(
            file=path,
            dtype=fields["dtype"],
            shape=shape,
            start=data_start + start,
            stop=data_start + stop,
        )
    return entries


def _whole_numbers(values: Any) -> tuple[int, ...]:
    """A list of numbers that are whole and not negative.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(values, list):
        raise ValueError("no list")
    for value in values:
        if type(value) is not int or value < 0:
            raise ValueError(f"no length or offset: {value!r}")
    return tuple(values)


def _check_overlap(entries: Mapping[str, TensorEntry]) -> None:
    """Check that no byte of a file belongs to two tensors."""

    def bounds(name: str) -> tuple[int, int]:
        return entries[name].start, entries[name].stop

    in_order = sorted(entries, key=bounds)
    for name, next_name in pairwise(in_order):
        entry = entries[name]
        next_entry = entries[next_name]
        if next_entry.start < entry.stop:
            raise CheckpointError(
                Fault(
                    str(entry.file),
                    f"{name} and {next_name} lie over the same bytes",
                    fix="download the file again",
                )
            )


def _check_entry(name: str, entry: TensorEntry, size: int) -> None:
    if not 0 <= entry.start <= entry.stop <= size:
        got = f"{counted(size, 'byte')}; {name} ends at byte {entry.stop}"
        raise CheckpointError(
            Fault(str(entry.file), "is cut short", got=got, fix="download the file again")
        )
    if entry.dtype not in STORED_DTYPES:
        return
    _, entry_bytes = STORED_DTYPES[entry.dtype]
    num_bytes = entry.stop - entry.start
    if num_bytes != entry_bytes * math.prod(entry.shape):
        got = f"{num_bytes} bytes for {entry.dtype} {list(entry.shape)}"
        raise CheckpointError(
            Fault(
                str(entry.file),
                f"{name} has the wrong length",
                got=got,
                fix="download the file again",
            )
        )


def list_some(names: Iterable[str], most: int = 3) -> str:
    """The first few of these names, and how many more there are."""
    listed = list(names)
    text = ", ".join(listed[:most])
    num_more = len(listed) - most
    if num_more > 0:
        return f"{text} and {num_more} more"
    return text
