"""Owns which files a data source means: the standard library's own sources, a file, a folder or a glob."""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from weft.errors import DataError, Fault

KEY = "data.source"
STDLIB_MOST_BYTES = 20 * 2**20
STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__"),  # not the standard library's own
    *("test", "tests", "idlelib", "lib2to3", "turtledemo"),  # not always installed
    *("encodings", "pydoc_data", "msilib"),  # tables rather than text
}
TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
TOKEN_SUFFIX = ".bin"
GZIP_SUFFIX = ".gz"
LINES_SUFFIX, TABLE_SUFFIX = ".jsonl", ".parquet"
READ_SUFFIXES = (
    *TEXT_SUFFIXES, TOKEN_SUFFIX, LINES_SUFFIX, TABLE_SUFFIX, LINES_SUFFIX + GZIP_SUFFIX, ".txt" + GZIP_SUFFIX
)  # fmt: skip
"""What is read of a folder; a file that is named, or matched by a pattern, is text whatever its suffix."""


def find_files(source: str) -> tuple[Path, ...]:
    """Files of a token source, sorted; either all of them hold tokens (.bin) or none.

    Raises:
        DataError: nothing there, nothing that matches, or kinds that do not mix.
    """
    try:
        files = _matches(source)
    except (OSError, RuntimeError) as error:  # a name too long, a folder without rights, an unknown ~user
        raise DataError(Fault(KEY, "cannot look for files there", f"{source!r}: {error}")) from None
    tokens = [file for file in files if file.suffix == TOKEN_SUFFIX]
    if tokens and len(tokens) < len(files):
        got = f"{len(tokens)} .bin and {len(files) - len(tokens)} others"
        raise DataError(
            Fault(KEY, f"{source} holds text and token files", got, "one kind", f"say which: '{source}/*.bin'")
        )
    return files


def kind_of(file: Path) -> str:
    """`.jsonl` or `.parquet`, `.gz` for other packed text, `.bin` for tokens, "" for plain text."""
    kind = Path(file.stem).suffix if file.suffix == GZIP_SUFFIX else file.suffix
    if kind == LINES_SUFFIX or file.suffix in (TABLE_SUFFIX, GZIP_SUFFIX, TOKEN_SUFFIX):
        return LINES_SUFFIX if kind == LINES_SUFFIX else file.suffix
    return ""


def is_plain_text(file: Path) -> bool:
    """Whether the bytes of a file are its text."""
    return kind_of(file) == ""


def _matches(source: str) -> tuple[Path, ...]:
    path = Path(source).expanduser()
    if source == "stdlib":
        return tuple(stdlib_files())
    if path.is_dir():
        return _in_folder(path)
    if path.exists():
        return (path,)
    if not glob.has_magic(source):
        raise DataError(
            Fault(KEY, "no such file or folder", repr(source), fix="check the path, or leave it out: stdlib")
        )
    found = sorted(Path(name) for name in glob.glob(str(path), recursive=True))
    files = tuple(file for file in found if file.is_file())
    if not files:
        raise DataError(Fault(KEY, "no file matches", repr(source), fix="check the pattern; ** goes into folders"))
    return files


def _in_folder(folder: Path) -> tuple[Path, ...]:
    files = tuple(sorted(file for file in _below(folder) if file.name.endswith(READ_SUFFIXES)))
    if not files:
        need = f"{' '.join(READ_SUFFIXES)} files"
        raise DataError(
            Fault(KEY, "no file to read in the folder", repr(str(folder)), need, f"name others: '{folder}/*.c'")
        )
    return files


def _below(folder: Path, left_out: frozenset[str] = frozenset()) -> Iterator[Path]:
    """Files below a folder, but for hidden ones and folders that are left out."""
    for here, folders, names in os.walk(folder, onerror=_unreadable_folder):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]
        yield from (Path(here, name) for name in names if not name.startswith("."))


def _unreadable_folder(error: OSError) -> None:
    raise DataError(
        Fault(KEY, "cannot read the folder", repr(error.filename), fix=f"{error.strerror}: check its rights")
    )


def stdlib_files() -> Iterator[Path]:
    """This Python's own .py files, sorted by path below its library folder, up to about 20 MB."""
    root = Path(sysconfig.get_path("stdlib"))
    files = (file for file in _below(root, frozenset(STDLIB_LEFT_OUT)) if file.suffix == ".py")
    total = 0
    for file in sorted(file for file in files if not file.name.startswith("_sysconfigdata")):
        total += file.stat().st_size
        if total > STDLIB_MOST_BYTES:
            return
        yield file
