"""Which files of Python code are a user's: not installed, not Python's own, not weft's."""

from __future__ import annotations

import functools
import sys
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
    for folder in sys.path:  # such as that of `pip install --target`
        if folder and name.startswith(f"{folder.rstrip('/')}/"):
            package = Path(name).relative_to(folder).parts[0].removesuffix(".py")
            if package in _installed_into(folder):
                return package
    return ""


@functools.cache
def _installed_into(folder: str) -> frozenset[str]:
    """The top-level packages and modules that an installer has written into a folder."""
    if not any(Path(folder).glob("*.dist-info")):
        return frozenset()
    from importlib.metadata import distributions  # it takes as long to import as this module

    files = (file for each in distributions(path=[folder]) for file in each.files or ())
    return frozenset(file.parts[0].removesuffix(".py") for file in files)
