"""Files of a data source: the standard library's own sources, a file, a folder or a glob."""

from __future__ import annotations

import glob
import lzma
import os
import sysconfig
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from weft.errors import DataError, Fault
from weft.small_files import UnreadableFile, open_regular

KEY = "data.source"
STDLIB = "stdlib"
"""Source: Python's own sources. They do not change while a process runs, which looks at them once."""
STDLIB_MAX_BYTES = 20 * 2**20
STDLIB_EXCLUDED = {
    *("site-packages", "dist-packages", "__pycache__"),  # not the standard library's own
    *("test", "tests", "idlelib", "lib2to3", "turtledemo"),  # not always installed
    *("encodings", "pydoc_data", "msilib"),  # tables rather than text
}
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
TOKEN_SUFFIX = ".bin"  # noqa: S105 - of token files
Compression = Literal["gz", "xz", "bz2", "zst"]
COMPRESSED_SUFFIXES: Mapping[str, Compression] = {
    ".gz": "gz",
    ".xz": "xz",
    ".bz2": "bz2",
    ".zst": "zst",
}
ROW_SUFFIXES = {
    ".jsonl": "json_lines",
    ".ndjson": "json_lines",
    ".json": "json_lines",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".tar": "tar",
}
"""Suffix -> kind of a file of rows; a JSON array differs from lines in its first byte."""
READ_SUFFIXES = (
    *TEXT_SUFFIXES, TOKEN_SUFFIX, ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet"
)  # fmt: skip
"""Suffixes of the files that are read in a folder, compressed or not; others, among them .json,
which often holds settings, are read where they are named or matched by a pattern.
"""


READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
"""What reading a file raises, compressed or not."""


def read_fault(file: Path, error: Exception) -> Fault:
    """What is wrong with a file whose reading raised one of `READ_ERRORS`."""
    if isinstance(error, OSError) and error.errno:
        why = error.strerror or str(error)
        return Fault(KEY, "cannot read the file", got=repr(str(file)), fix=f"{why}: check it")
    names = {"gz": "gzip", "zst": "zstd"}
    kind = COMPRESSED_SUFFIXES.get(file.suffix.lower(), "compressed")
    what = f"{file} is a broken {names.get(kind, kind)} file"
    return Fault(KEY, what, got=str(error), fix="fetch the file again")


def inner_name(file: Path) -> str:
    """The name of a file in lower case, without the suffix of its compression."""
    name = Path(file.name.lower())
    return name.stem if name.suffix in COMPRESSED_SUFFIXES else name.name


def is_token_file(file: Path) -> bool:
    """Whether a file holds the ids of tokens."""
    return file.suffix.lower() == TOKEN_SUFFIX


def find_files(source: str) -> tuple[Path, ...]:
    """Files of a token source, sorted; either all of them hold tokens (.bin) or none.

    Raises:
        DataError: no such file, no match, or text and token files together.
    """
    try:
        files = _matching_files(source)
    except (OSError, RuntimeError) as error:
        # a name that is too long, a folder without rights, an unknown ~user
        got = f"{source!r}: {error}"
        raise DataError(
            Fault(KEY, "cannot search for files there", got=got, fix="check the path")
        ) from None
    check_one_kind(source, files)
    return files


def check_one_kind(source: str, files: Sequence[Path]) -> None:
    """Check that all files hold tokens, or none.

    Raises:
        DataError: some do.
    """
    num_token_files = sum(map(is_token_file, files))
    num_others = len(files) - num_token_files
    if num_token_files and num_others:
        got = f"{num_token_files} .bin and {num_others} others"
        fix = f"choose one kind: '{source}/*.bin'"
        raise DataError(
            Fault(KEY, f"{source} holds text and token files", got=got, need="one kind", fix=fix)
        )


def left_out(source: str) -> Iterator[str]:
    """The suffixes of the visible files in a folder that are not read, one a file."""
    folder = Path(os.path.expanduser(source))
    if not folder.is_dir():
        return
    for file in _below(folder):
        if not inner_name(file).endswith(READ_SUFFIXES):
            yield file.suffix.lower().removeprefix(".") or "without suffix"


def _matching_files(source: str) -> tuple[Path, ...]:
    path = Path(os.path.expanduser(source))
    if not source.strip():
        fix = "name stdlib, Python's own sources, or a path; . is this folder"
        raise DataError(Fault(KEY, "is empty", got=repr(source), fix=fix))
    if source == STDLIB:
        return stdlib_files()
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return (path,)
    if not glob.has_magic(source):
        fix = "check the path, or name stdlib: Python's own sources"
        raise DataError(Fault(KEY, "no such file or folder", got=repr(source), fix=fix))
    found = map(Path, glob.glob(str(path), recursive=True))
    files = sorted(file for file in found if file.is_file())
    if not files:
        fix = "check the pattern; ** matches folders of any depth"
        raise DataError(Fault(KEY, "no file matches", got=repr(source), fix=fix))
    return tuple(files)


def _in_folder(folder: Path) -> tuple[Path, ...]:
    readable: list[Path] = [
        file for file in _below(folder) if inner_name(file).endswith(READ_SUFFIXES)
    ]
    readable.sort()
    for file in readable:
        _check_in_folder(file, folder)
    if not readable:
        suffixes = " ".join(READ_SUFFIXES)
        fault = Fault(
            KEY,
            "no file to read in the folder",
            got=repr(str(folder)),
            need=f"{suffixes} files, compressed or not",
            fix=f"name others: '{folder}/*.c'",
        )
        raise DataError(fault)
    return tuple(readable)


def _below(folder: Path, excluded: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below a folder, except hidden ones and those in excluded folders."""
    for here, folders, names in os.walk(folder, onerror=_unreadable_folder):
        entered = [name for name in folders if _is_visible(name) and name not in excluded]
        folders[:] = entered  # the walk reads this list
        for name in names:
            if _is_visible(name):
                yield Path(here, name)


def _is_visible(name: str) -> bool:
    return not name.startswith(".")


def _check_in_folder(file: Path, folder: Path) -> None:
    """Check that a file found in a folder is a regular one, or a link to one inside the folder."""
    try:
        open_regular(file, within=folder).close()
    except UnreadableFile as error:
        fix = f"remove it, copy its target, or name the files: '{folder}/*{file.suffix}'"
        raise DataError(error.fault(KEY, fix=fix)) from None


def _unreadable_folder(error: OSError) -> None:
    fix = f"{error.strerror}: check its permissions"
    raise DataError(Fault(KEY, "cannot read the folder", got=repr(error.filename), fix=fix))


@cache
def stdlib_files() -> tuple[Path, ...]:
    """This Python's own .py files, sorted by path below its library folder, up to about 20 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    candidates = [
        file
        for file in _below(root, frozenset(STDLIB_EXCLUDED))
        if file.suffix == ".py" and not file.name.startswith("_sysconfigdata")
    ]
    found: list[Path] = []
    total_bytes = 0
    for file in sorted(candidates):
        total_bytes += file.stat().st_size
        if total_bytes > STDLIB_MAX_BYTES:
            break
        found.append(file)
    return tuple(found)
