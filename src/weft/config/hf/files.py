"""Owns which tensors lie in a Hugging Face folder and where: the index and the headers of safetensors files. Pure: no torch.

A safetensors file is | length of the header, 8 bytes, little-endian | header, JSON | data |; the header has for each
tensor its dtype, shape and the bytes of the data where it lies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import CheckpointError, Fault

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
}
"""safetensors' name of a type that parameters may have -> torch's, bytes of one entry."""
MOST_HEADER_BYTES = 100_000_000
"""As safetensors' own reader has it."""


@dataclass(frozen=True)
class Entry:
    """One tensor: type as safetensors names it, and its bytes `start` to `stop` of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def list_tensors(folder: Path) -> dict[str, Entry]:
    """All tensors of a folder by name, in the order of the files.

    Raises:
        CheckpointError: no weights, a missing or damaged file, a tensor that stands twice or not where the index says.
    """
    files = _files_of(folder)
    found: dict[str, Entry] = {}
    for file in dict.fromkeys(files.values()) or [WHOLE]:
        for name, entry in read_header(folder / file).items():
            if name in found:
                raise CheckpointError(Fault(str(entry.file), f"{name} stands in {found[name].file.name} too"))
            found[name] = entry
    for name, file in files.items():
        if name not in found or found[name].file.name != file:
            fix = "get the folder anew: a file is not the one that the index was written for"
            raise CheckpointError(Fault(str(folder / INDEX), f"{name} is not in {file}", fix=fix))
    return found


def _files_of(folder: Path) -> dict[str, str]:
    """Tensor -> file, as the index says; nothing where there is one file without an index."""
    if not folder.is_dir():
        raise CheckpointError(Fault(str(folder), "no such folder", need="a folder with config.json and safetensors"))
    index = folder / INDEX
    if index.is_file():
        files = read_json(index).get("weight_map")
        named = isinstance(files, dict) and all(isinstance(file, str) and "/" not in file for file in files.values())
        if not named or not files:
            raise CheckpointError(Fault(str(index), "has no weight_map of tensor names and file names"))
        if missing := sorted({file for file in files.values() if not (folder / file).is_file()}):
            got = f"{len(missing)} of {len(set(files.values()))} files are missing"
            raise CheckpointError(
                Fault(str(folder / missing[0]), "missing shard", got, fix="get the folder again, whole")
            )
        return dict(files)
    if (folder / WHOLE).is_file():
        return {}
    pickled = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
    fix = "save it as safetensors: model.save_pretrained(folder) in transformers" if pickled else ""
    raise CheckpointError(Fault(str(folder), "holds no weights", need=f"{WHOLE}, or {INDEX} and its files", fix=fix))


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file.

    Raises:
        CheckpointError: it is none, or is cut short.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER_BYTES):
                raise CheckpointError(Fault(str(path), "is no safetensors file, or cut short", f"{size} bytes"))
            header = json.loads(file.read(length))
        entries = {
            name: _entry(path, about, data=8 + length) for name, about in header.items() if name != "__metadata__"
        }
    except OSError as error:
        raise CheckpointError(Fault(str(path), "cannot be read", error.strerror or str(error))) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(Fault(str(path), "is no safetensors file: its header cannot be read")) from error
    for name, entry in entries.items():
        _check(name, entry, size)
    return entries


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
        CheckpointError: it is missing or no such file.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(Fault(str(path), "no such file")) from None
    except OSError as error:
        raise CheckpointError(Fault(str(path), "cannot be read", error.strerror or str(error))) from error
    except ValueError as error:
        raise CheckpointError(Fault(str(path), "is no JSON", str(error))) from None
    if not isinstance(content, dict):
        raise CheckpointError(Fault(str(path), "is no JSON object", type(content).__name__))
    return content


def _entry(path: Path, about: Mapping[str, Any], *, data: int) -> Entry:
    start, stop = about["data_offsets"]
    return Entry(path, str(about["dtype"]), tuple(map(int, about["shape"])), data + int(start), data + int(stop))


def _check(name: str, entry: Entry, size: int) -> None:
    if not 0 <= entry.start <= entry.stop <= size:
        got = f"{size} bytes; {name} ends at byte {entry.stop}"
        raise CheckpointError(Fault(str(entry.file), "is cut short", got, fix="get the file again"))
    width = DTYPES.get(entry.dtype, ("", 0))[1]
    if width and entry.stop - entry.start != width * math.prod(entry.shape):
        got = f"{entry.stop - entry.start} bytes for {entry.dtype} {list(entry.shape)}"
        raise CheckpointError(Fault(str(entry.file), f"{name} has the wrong length", got))


def some(names: Iterable[str], most: int = 3) -> str:
    """A few of these names and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
