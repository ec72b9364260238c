"""Which files of Python code are a user's: not installed, not Python's own, not weft's."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path

OWN_PACKAGES = ("weft", "weft_plan", "weft_selftest")
LIBRARIES = frozenset({"torch", "numpy", "transformers", *OWN_PACKAGES})
"""Packages whose code is not a user's, though modules of a model are theirs."""
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
SOURCES = Path(__file__).parents[2]
WEFT_FOLDERS = tuple(f"{SOURCES / each}/" for each in OWN_PACKAGES)
OWN_FOLDERS = (*WEFT_FOLDERS, sysconfig.get_paths()["stdlib"])
WITHOUT_FILE = ("<frozen", "<string>", "<attrs", "<__array_function__")


@functools.lru_cache(maxsize=4096)
def is_users_file(name: str, packages: frozenset[str]) -> bool:
    """Whether a file of code belongs to a model: it is not installed, or in one of these packages."""
    package = package_of_file(name)
    if package:
        return package in packages
    return not name.startswith((*OWN_FOLDERS, *WITHOUT_FILE))


@functools.lru_cache(maxsize=4096)
def package_of_file(name: str) -> str:
    """The top-level package of an installed file; "" of any other."""
    parts = Path(name).parts
    for folder in PACKAGE_FOLDERS:
        if folder in parts[:-1]:
            return parts[parts.index(folder) + 1].removesuffix(".py")
    return ""
