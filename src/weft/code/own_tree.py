"""The files of a module's own tree that it imports, directly or not, found by their import statements: nothing is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path

SUFFIX = ".py"
MAX_FILES = 1000
"""Files of a tree that are looked at."""
MAX_SOURCE_BYTES = 2**24
"""A longer file is no source file that a person wrote: its imports are not followed."""
SUFFIXES = tuple(all_suffixes())
"""Ends of the names of files that Python imports: sources, byte code, compiled extensions."""


def files_of_tree(first: Path, root: Path, *, package: str = "") -> tuple[Path, ...]:
    """A module's file and, sorted, the files below a folder that it imports, directly or not.

    Args:
        first: the module's file, resolved.
        root: the folder that names at the top are searched in.
        package: where it is not empty, only modules of this package are followed.
    """
    found = {first}
    waiting = [first]
    known: set[str] = set()  # most files import the same modules: each is looked for once
    while waiting and len(found) < MAX_FILES:
        path = waiting.pop()
        for name in _imported_names(path, root):
            if package and name.partition(".")[0] != package:
                continue
            for module in _with_packages(name):
                if module in known:
                    continue
                known.add(module)
                new = [source for source in _files_of(root, module) if source not in found]
                found.update(new)
                waiting.extend(new)
    return (first, *sorted(found - {first}))


def _imported_names(path: Path, root: Path) -> Iterator[str]:
    """Dotted names of the modules that a source file imports; none of a file that is none."""
    if path.suffix != SUFFIX or path.stat().st_size > MAX_SOURCE_BYTES:
        return
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # nor can Python import it
    package = path.parent.relative_to(root).parts if path.is_relative_to(root) else ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name
        elif isinstance(node, ast.ImportFrom):
            base = _imported_package(node, package)
            yield base
            for alias in node.names:
                yield f"{base}.{alias.name}".lstrip(".")


def _imported_package(node: ast.ImportFrom, package: tuple[str, ...]) -> str:
    """The dotted name after `from`, relative to the root; dots at its start count from `package`."""
    words: list[str] = []
    if node.level:
        words.extend(package[: len(package) - node.level + 1])
    if node.module:
        words.extend(node.module.split("."))
    return ".".join(words)


def _with_packages(name: str) -> Iterator[str]:
    """A module's name behind those of the packages above it."""
    parts = name.split(".") if name else []
    for stop in range(1, len(parts) + 1):
        yield ".".join(parts[:stop])


def _files_of(root: Path, name: str) -> Iterator[Path]:
    """The files that may be the module of this name below a folder."""
    base = root.joinpath(*name.split("."))
    for suffix in SUFFIXES:
        for path in (base.parent / f"{base.name}{suffix}", base / f"__init__{suffix}"):
            if path.is_file():
                yield path.resolve()
