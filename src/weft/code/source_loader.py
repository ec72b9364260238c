"""Imports the modules of a folder from their sources: byte code beside them is neither read nor written. No torch."""

from __future__ import annotations

import functools
import importlib.machinery as machinery
import sys
from pathlib import Path
from types import CodeType
from typing import Any

from weft.code.users_files import is_users_file


class SourceLoader(machinery.SourceFileLoader):
    """Compiles a file from its source, which is what was trusted (see Note [Trust in code])."""

    def get_code(self, fullname: str) -> CodeType:
        """The code of the source."""
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


LOADERS: tuple[tuple[Any, list[str]], ...] = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (SourceLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)
"""As Python's own finder has them, in its order."""


@functools.cache
def import_sources_of(folder: Path) -> None:
    """Have all modules below a folder compiled from their sources, those of libraries excepted."""

    def finder(name: str) -> machinery.FileFinder:
        path = Path(name).resolve()
        if not path.is_relative_to(folder) or not is_users_file(f"{path}/x.py", frozenset()):
            raise ImportError
        return machinery.FileFinder(name, *LOADERS)

    sys.path_hooks.insert(0, finder)
    for name in list(sys.path_importer_cache):
        if Path(name).is_relative_to(folder):
            del sys.path_importer_cache[name]
