"""One identity of the code of a run: digests of its parts by name, and what differs between two. No torch.

class Layer (my_model.py)      code of the class and its methods      module my_model.py    its source file
function blocks (my_model.py)  code, what it closes over, defaults    package einops        version
variable SIZES (my_model.py)   its value                              environment variable SCALE, file table.json
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.code.graph import CodeGraph
from weft.code.reachable import Reach
from weft.code.reads import Reads, digest_of_file, digest_of_variable
from weft.code.sources import source_digests, version_of
from weft.code.values import short_digest
from weft.small_files import UnreadableFile, read_json_object

CODE_FILE = "code.json"
"""File of a run folder: the identity of its code."""
MAX_FILE_BYTES = 2**24
PYTHON = "python"
VARIABLE, FILE, MODULE, PACKAGE = "environment variable ", "file ", "module ", "package "
NOT_COMPARED = (PYTHON, PACKAGE)
"""Parts that another installation may change without another model."""


@dataclass(frozen=True)
class CodeIdentity:
    """Digests of the parts of some code.

    Attributes:
        parts: name of a part -> its digest; equal in all processes that have the same code.
        unknown: what could not be hashed, and why; where there is any, equal parts say little.
        asks_compiler: functions that ask whether they are compiled, and so may compute other numbers
            where they are.
    """

    parts: Mapping[str, str] = field(default_factory=dict)
    unknown: tuple[str, ...] = ()
    asks_compiler: tuple[str, ...] = ()

    @property
    def digest(self) -> str | None:
        """Of all parts; None where some code could not be hashed."""
        if self.unknown:
            return None
        text = "\n".join(f"{name}: {digest}" for name, digest in sorted(self.parts.items()))
        return short_digest(text.encode())

    def to_json(self) -> str:
        """As the file of a run folder has it, one part a line."""
        record = {"parts": dict(sorted(self.parts.items())), "unknown": self.unknown}
        return json.dumps(record, indent=1) + "\n"

    def __or__(self, other: CodeIdentity) -> CodeIdentity:
        """The identity of both pieces of code together."""
        unknown = dict.fromkeys((*self.unknown, *other.unknown))
        asks_compiler = dict.fromkeys((*self.asks_compiler, *other.asks_compiler))
        return CodeIdentity({**self.parts, **other.parts}, tuple(unknown), tuple(asks_compiler))


def identity_of(
    values: Mapping[str, Any], *, module: str, packages: frozenset[str] = frozenset()
) -> CodeIdentity:
    """The identity of some values and of all code and values that they reach.

    Args:
        values: by the names that a user gave them; None: there is none.
        module: in which they have these names.
        packages: installed ones whose code is a user's.
    """
    graph = CodeGraph(Reach(packages, most_items=math.inf))
    for name, value in sorted(values.items()):
        if value is not None:
            graph.add(name, value, module)
    graph.add_patches()
    parts = {
        PYTHON: f"{sys.version_info.major}.{sys.version_info.minor}",
        **source_digests(graph.modules, graph.lazy, packages),
        **graph.digests(),
    }
    versions = {f"{PACKAGE}{name}": version_of(name) for name in sorted(graph.packages - packages)}
    unversioned = [f"{name} has no version" for name, version in versions.items() if not version]
    parts.update({name: version for name, version in versions.items() if version})
    return CodeIdentity(parts, (*graph.unknown, *unversioned), tuple(graph.asks_compiler))


def identity_of_reads(reads: Reads, folder: Path | None) -> CodeIdentity:
    """The identity of what code has read so far.

    Args:
        folder: below which files have relative names: that of the model's file.
    """
    parts = {f"{VARIABLE}{name}": digest for name, digest in reads.variables.items()}
    for name, digest in reads.files.items():
        parts[f"{FILE}{_relative(Path(name), folder)}"] = digest
    return CodeIdentity(parts, tuple(reads.unknown))


def _relative(path: Path, folder: Path | None) -> Path:
    if folder is None or not path.is_relative_to(folder):
        return path
    return path.relative_to(folder)


def stored_parts(folder: Path) -> dict[str, str]:
    """The parts of the code of the run in a folder; none of runs that have stored none."""
    try:
        stored = read_json_object(folder / CODE_FILE, max_bytes=MAX_FILE_BYTES)
    except (UnreadableFile, ValueError):
        return {}
    parts = stored.get("parts")
    return (
        {str(name): str(digest) for name, digest in parts.items()}
        if isinstance(parts, dict)
        else {}
    )


def changed_parts(
    stored: Mapping[str, str], current: CodeIdentity, *, folder: Path | None
) -> tuple[str, ...]:
    """Names of parts of stored code that are others now, as messages name them.

    Packages may have been updated meanwhile. Byte code of another Python is not compared: sources,
    variables of the environment and files are. Of these, stored ones are looked up now, too, as the
    current process may not have read them yet.

    Args:
        folder: of the model's file.
    """
    same_python = stored.get(PYTHON) == current.parts.get(PYTHON)
    now = {**current.parts, **dict(_reads_now(stored.keys() - current.parts.keys(), folder))}
    names = sorted(stored.keys() | now.keys())
    found = [
        name for name in names if _is_compared(name, same_python) and _differs(name, stored, now)
    ]
    return tuple(map(_shown, _without_sources(found)))


def _without_sources(names: Sequence[str]) -> Iterator[str]:
    """All but modules and source files of which a class, function or variable is named, too."""
    places = {match[1] for name in names if (match := re.search(r"\((.*)\)", name))}
    files = {f"{place.removesuffix('.py').rpartition('.')[2]}.py" for place in places}
    for name in names:
        is_named = name.startswith(FILE) and _file_name(name) in files
        if not is_named and name.removeprefix(MODULE) not in places:
            yield name


def _shown(name: str) -> str:
    return f"{FILE}{_file_name(name)}" if name.startswith(FILE) else name


def _file_name(name: str) -> str:
    """The last name of the path of a part that is a file."""
    return Path(name.removeprefix(FILE)).name


def _is_compared(name: str, same_python: bool) -> bool:
    if name.startswith(NOT_COMPARED):
        return False
    return same_python or name.startswith((MODULE, VARIABLE, FILE))


def _differs(name: str, stored: Mapping[str, str], now: Mapping[str, str]) -> bool:
    """Whether a part is another one. What only one of two runs has read changed nothing alone, and
    files may lie elsewhere: those of one name are compared.
    """
    if name.startswith(VARIABLE):
        return name in stored and stored[name] != now.get(name, stored[name])
    if not name.startswith(FILE):
        return stored.get(name) != now.get(name)
    if name in stored and name in now:
        return stored[name] != now[name]
    digest, others = (stored[name], now) if name in stored else (now[name], stored)
    last = _file_name(name)
    same = [
        others[other] for other in others if other.startswith(FILE) and _file_name(other) == last
    ]
    return bool(same) and digest not in same


def _reads_now(names: Iterable[str], folder: Path | None) -> Iterator[tuple[str, str]]:
    """Current digests of variables and files that this process may not have read."""
    for name in names:
        if name.startswith(VARIABLE):
            yield name, digest_of_variable(os.environ.get(name.removeprefix(VARIABLE)))
        elif name.startswith(FILE):
            path = (folder or Path()) / name.removeprefix(FILE)
            with contextlib.suppress(ValueError):  # it has no digest
                if path.exists():
                    yield name, digest_of_file(str(path))
