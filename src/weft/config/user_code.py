"""Python code of users: modules by path or dotted name, objects by `package.module:Name`, a digest of their sources."""

from __future__ import annotations

import hashlib
import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.code.labels import FILE_MODULE
from weft.code.own_tree import files_of_tree
from weft.code.reads import Reads
from weft.code.source_loader import SourceLoader, import_sources_of
from weft.code.trust import ALL, VARIABLE, digest_before_import, has_changed, is_trusted, trust
from weft.code.users_files import LIBRARIES, is_users_file, package_of_file
from weft.errors import ConfigError, Fault, did_you_mean, type_and_message

SUFFIX = ".py"


def is_file_reference(text: str) -> bool:
    """Whether a reference names a file: `my_model.py`, `models/gpt.py`."""
    return text.endswith(SUFFIX)


def is_reference(text: object) -> bool:
    """Whether a text names Python code: a file, or a dotted module `package.module`."""
    if not isinstance(text, str):
        return False
    words = text.split(".")
    is_dotted = len(words) > 1 and all(word.isidentifier() for word in words)
    return is_file_reference(text) or is_dotted


def canonical_reference(text: str) -> str:
    """The same reference from any working folder: paths become absolute."""
    if not is_file_reference(text):
        return text
    return str(Path(text).expanduser().resolve())


def file_folder(reference: str) -> Path | None:
    """The folder of a model file, from which its files are named; None of any other reference."""
    return Path(canonical_reference(reference)).parent if is_file_reference(reference) else None


def load_module(reference: str, *, key: str) -> ModuleType:
    """The module of a file or of a dotted name; imported once in a process, if this user trusts it
    (see Note [Trust in code]).

    Args:
        reference: as in `is_reference`; modules are also searched in the working folder.
        key: config key of the reference, for messages.

    Raises:
        ConfigError: it does not exist, is not trusted, or raises on import.
    """
    if is_file_reference(reference):
        return _load_file(Path(canonical_reference(reference)), key=key)
    _check_trusted(reference, key=key)
    try:
        return sys.modules.get(reference) or _import(reference)
    except Exception as error:
        raise _import_fault(reference, error, key=key) from error


def load_object(reference: str, *, key: str) -> Any:
    """The object that `package.module:Name` or `file.py:Name` names.

    Raises:
        ConfigError: the module cannot be imported, or has no such name.
    """
    module_name, colon, name = reference.rpartition(":")
    if not colon or not name.isidentifier():
        need = "package.module:Name or file.py:Name"
        raise ConfigError(
            Fault(
                key,
                "names no Python object",
                got=repr(reference),
                need=need,
                fix=f"--{key} with {need}",
            )
        )
    module = load_module(module_name, key=key)
    if not hasattr(module, name):
        public = [known for known in vars(module) if not known.startswith("_")]
        fix = did_you_mean(name, public)
        raise ConfigError(Fault(key, f"{module_name} has no {name!r}", fix=fix))
    return getattr(module, name)


def trust_named(name: object) -> None:
    """Trust the code that the user has named, where a value names code: `my_model.py`,
    `package.module`, `package.module:Class`.
    """
    reference, colon, _ = str(name).rpartition(":")
    reference = reference if colon else str(name)
    if is_reference(reference):
        _search_working_folder()
        trust(canonical_reference(reference))


def _check_trusted(reference: str, *, key: str) -> None:
    if reference in sys.modules:
        return
    _search_working_folder()
    digest = digest_before_import(reference)
    if digest is None:
        fix = "check the name; a file is named by its path: my_model.py"
        raise ConfigError(Fault(key, "no such module", got=repr(reference), fix=fix))
    if os.environ.get(VARIABLE) == ALL:
        trust(reference)
        return
    if is_trusted(digest, os.environ):
        return
    what = "is code that only a stored file names, and you have not run it on this machine"
    fix = "read it and the files beside it, then repeat the command with --trust_code"
    if has_changed(reference, os.environ):
        what = "the code has changed since you ran it, and only a stored file names it"
        fix = f"restore it, or {fix}"
    raise ConfigError(Fault(key, what, got=repr(reference), fix=fix))


def _load_file(path: Path, *, key: str) -> ModuleType:
    name = _module_name(path)
    if name in sys.modules:
        return sys.modules[name]
    _check_file(path, key=key)
    _check_trusted(str(path), key=key)
    loader = SourceLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a file that ends in .py has a spec"
    assert spec.loader is not None, "and a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.append(folder)  # for the modules beside it
    import_sources_of(path.parent)
    spec.loader_state = reads = Reads()
    try:
        with reads.recorded():
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_fault(str(path), error, key=key) from error
    return module


def _import(name: str) -> ModuleType:
    """Import a module by its dotted name, and record what it reads meanwhile."""
    spec = importlib.util.find_spec(name.partition(".")[0])
    for folder in _roots(spec):
        import_sources_of(folder)
    reads = Reads(installed_packages((spec and spec.origin) or ""))
    with reads.recorded():
        module = importlib.import_module(name)
    if module.__spec__ is not None:
        module.__spec__.loader_state = reads
    return module


def _roots(spec: importlib.machinery.ModuleSpec | None) -> Iterator[Path]:
    """The folders that hold a module at the top: its file, or the folder of the package."""
    if spec is None:
        return
    for place in spec.submodule_search_locations or (spec.origin or "",):
        if is_users_file(place, frozenset()):
            yield Path(place).resolve().parent


def reads_of(module: ModuleType) -> Reads:
    """What a module has read when it was imported by `load_module`; nothing of any other, whose
    values tell.
    """
    reads = getattr(module.__spec__, "loader_state", None)
    if isinstance(reads, Reads):
        return reads
    return Reads(installed_packages(getattr(module, "__file__", None) or ""))


def installed_packages(*files: str) -> frozenset[str]:
    """The installed packages of these files, whose code is a user's model though it is installed."""
    return frozenset(filter(None, map(package_of_file, files))) - LIBRARIES


def check_reference(reference: str, *, key: str) -> None:
    """A reference names a file or module that this user trusts; nothing is imported.

    Raises:
        ConfigError: there is none, or it is new to this user.
    """
    if is_file_reference(reference):
        _check_file(Path(canonical_reference(reference)), key=key)
    _check_trusted(canonical_reference(reference), key=key)


def _check_file(path: Path, *, key: str) -> None:
    if not path.is_file():
        what = "is no file" if path.exists() else "no such file"
        raise ConfigError(Fault(key, what, got=repr(str(path)), fix="check the path"))


def _module_name(path: Path) -> str:
    """A name that no other file's module has."""
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return f"{FILE_MODULE}{path.stem}_{digest}"


def is_file_module(module: ModuleType) -> bool:
    """Whether a module was loaded from a path, not by its dotted name."""
    return module.__name__.startswith(FILE_MODULE)


def _search_working_folder() -> None:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)


def _import_fault(reference: str, error: BaseException, *, key: str) -> ConfigError:
    place = _place_of(error, reference)
    what = f"{reference} raises on import{place}: {type_and_message(error)}"
    return ConfigError(Fault(key, what, fix="run it with python to see the traceback"))


def _place_of(error: BaseException, reference: str) -> str:
    """The line of the user's file that raised."""
    if isinstance(error, SyntaxError) and error.lineno:
        return f", line {error.lineno}"
    line = ""
    traceback = error.__traceback__
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == reference:
            line = f", line {traceback.tb_lineno}"
        traceback = traceback.tb_next
    return line


def source_digest(module: ModuleType) -> str:
    """SHA-256 of the sources of a module and of the modules of its own folder or package that it imports, 16 hex digits."""
    digest = hashlib.sha256()
    for path in _sources(module):
        name = path.name.encode()
        content = path.read_bytes()
        digest.update(name + b"\0" + content + b"\0")
    return digest.hexdigest()[:16]


def source_text(module: ModuleType) -> str:
    """The text of a module's own file."""
    return Path(str(module.__file__)).read_text(encoding="utf-8")


def _sources(module: ModuleType) -> tuple[Path, ...]:
    """The module's file and, sorted, those that it imports from its own tree, directly or not."""
    first = Path(str(module.__file__)).resolve()
    if is_file_module(module):
        return files_of_tree(first, first.parent)
    depth = module.__name__.count(".") + (first.name == "__init__.py")
    return files_of_tree(first, first.parents[depth], package=module.__name__.partition(".")[0])
