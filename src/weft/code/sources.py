"""Source files of users' modules and of all that they import, and versions of installed packages. No torch."""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

from weft.code.labels import FILE_MODULE, module_label
from weft.code.users_files import is_users_file
from weft.code.values import short_digest

IMPORT = re.compile(
    rb"(?:^|[;:])[ \t]*(?:from[ \t]+(\.*[\w.]*)[ \t]+)?import[ \t]+(\([^)]*\)|(?:\\\r?\n|[^\n;#])*)",
    re.MULTILINE,
)
"""An import statement, wherever a line has one; what a text in the file says is taken for one, too."""
NAME = re.compile(rb"([\w.]+|\*)(?:\s+as\s+\w+)?")
MAIN = "__main__"


def source_digests(
    modules: Iterable[str], lazy: Iterable[tuple[str, str]], packages: frozenset[str]
) -> dict[str, str]:
    """Name of each module of users -> digest of its file: of these modules, and of all that their
    files import, directly or not. The file of a program (`__main__`) has no digest: it says how a
    model is trained, too.

    Args:
        lazy: package, and names of modules that code imports when it runs.
        packages: installed ones that are users'.
    """
    finder = _Finder()
    waiting = [(name, finder.file(name)) for name in sorted(modules)]
    for package, name in sorted(lazy):
        waiting += finder.files(package, name)
    found: dict[str, str] = {}
    seen: set[Path] = set()
    while waiting:
        name, path = waiting.pop()
        if name == MAIN or path is None or path in seen or not is_users_file(str(path), packages):
            continue
        seen.add(path)
        content = path.read_bytes()
        found[f"module {module_label(name)}"] = short_digest(content)
        if path.suffix == ".py":
            waiting += _imported(finder, name, path.stem == "__init__", content)
    return found


def _imported(
    finder: _Finder, name: str, is_package: bool, content: bytes
) -> Iterator[tuple[str, Path | None]]:
    """Modules that a file names in imports, with their files."""
    package = name if is_package else name.rpartition(".")[0]
    for origin, names in IMPORT.findall(content):
        words = [match[1].decode() for match in NAME.finditer(names)]
        base = origin.decode()
        if not base:
            for word in words:
                yield from finder.files(package, word)
            continue
        yield from finder.files(package, base)
        for word in words:  # of a package, its modules
            yield from finder.files(package, f"{base}{'' if base.endswith('.') else '.'}{word}")


@dataclass
class _Finder:
    """Finds the files of modules, without importing any."""

    _found: dict[str, Path | None] = field(default_factory=dict)

    def files(self, package: str, name: str) -> Iterator[tuple[str, Path | None]]:
        """The module of this name with its file, and the packages above it.

        Args:
            package: that a name with dots at its start counts from.
        """
        dots = len(name) - len(name.lstrip("."))
        if dots:
            kept = package.split(".")[: package.count(".") + 2 - dots]
            name = ".".join([*kept, name.lstrip(".")]).strip(".")
        words = name.split(".")
        if words[0] in sys.stdlib_module_names:
            return
        for stop in range(1, len(words) + 1):
            full = ".".join(words[:stop])
            yield full, self.file(full)

    def file(self, name: str) -> Path | None:
        """The file of a module; None: it has none, or there is no such module."""
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def _search(self, name: str) -> Path | None:
        module = sys.modules.get(name)
        if module is not None:
            path = Path(getattr(module, "__file__", None) or "")
            return path if path.is_file() else None
        parent, _, last = name.rpartition(".")
        if not parent:
            spec = _spec(name)
            return Path(spec.origin) if spec and spec.has_location and spec.origin else None
        for folder in self._folders(parent):
            for path in (folder / f"{last}.py", folder / last / "__init__.py"):
                if path.is_file():
                    return path
        return None

    def _folders(self, package: str) -> list[Path]:
        """Where the modules of a package are."""
        module = sys.modules.get(package)
        if module is not None:
            return [Path(each) for each in getattr(module, "__path__", ())]
        path = self.file(package)
        if path is not None:
            return [path.parent] if path.stem == "__init__" else []
        spec = None if "." in package else _spec(package)  # a package without __init__.py
        return [Path(each) for each in (spec and spec.submodule_search_locations) or ()]


def _spec(name: str) -> ModuleSpec | None:
    """How Python would import a module at the top."""
    if name.startswith(FILE_MODULE):
        return None
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


@functools.lru_cache(maxsize=256)
def version_of(name: str) -> str | None:
    """The version of an installed package, or the digest of its file; None: it has neither."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    module = sys.modules.get(name)
    version = getattr(module, "__version__", None)
    if isinstance(version, str):
        return version
    path = _Finder().file(name)
    return None if path is None else short_digest(path.read_bytes())
