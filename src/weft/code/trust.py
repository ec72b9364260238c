"""Which code of users may run: its digest before anything is imported, and the list of what this user has run. No torch.

Note [Trust in code]
    Code that the user names, on the command line or in Python, is put on the list and runs. Code that
    only a stored file names (a run.toml, a manifest) runs only if its digest is on the list. The digest
    covers the file, all files of its folder that its import statements lead to, and the place of the
    file: what else it reads there when it runs was there when the user has run it.

    The list is a folder of the user's, one file a digest. Where it cannot be written, an environment
    variable has the digests for the processes that this one starts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import os
import stat
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path

from weft.code.own_tree import SUFFIX, files_of_tree
from weft.code.users_files import package_of_file
from weft.small_files import user_folder

FOLDER = "code"
TRUST_FLAG = "--trust_code"
VARIABLE = "WEFT_TRUSTED_CODE"
ALL = "all"
"""As the variable: code is put on the list when it is first imported; set by `--trust_code`."""
OWN_FOLDER = Path(__file__).resolve().parents[1]
"""Of the package weft."""
MAX_CHUNK = 2**20
MAX_LISTED = 10_000
"""Entries of the list that are looked through for a message."""
DIGITS = 32


def digest_before_import(reference: str) -> str | None:
    """The digest of the code that a reference names, and of its place; None: there is no such code. Of
    what the user has installed, and of weft, which runs already, the file alone counts.

    Args:
        reference: an absolute path of a file, or a dotted name that Python can find.
    """
    first = _file_of(reference)
    if first is None:
        return None
    root = first.parent
    if not reference.endswith(SUFFIX):
        depth = reference.count(".") + (first.name.partition(".")[0] == "__init__")
        root = first.parents[min(depth, len(first.parents) - 1)]
    installed = first.is_relative_to(OWN_FOLDER) or package_of_file(str(first))  # all of it
    digest = hashlib.sha256(f"{reference}\0{first}\0".encode())
    for path in (first,) if installed else files_of_tree(first, root):
        digest.update(f"{path}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while chunk := file.read(MAX_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()[:DIGITS]


def trust(reference: str, environ: Mapping[str, str] | None = None) -> None:
    """Put the code that a reference names on the list of this user, as it is now.

    Args:
        environ: variables that name the list; None: those of this process.
    """
    environ = os.environ if environ is None else environ
    digest = digest_before_import(reference)
    if digest is not None:
        _put_on_list(digest, reference, environ)


def digest_of_text(key: str, text: str) -> str:
    """The digest of a text that a run acts on, such as a command: the value of a key of its config."""
    return hashlib.sha256(f"{key}\0{text}".encode()).hexdigest()[:DIGITS]


def trust_text(key: str, text: str) -> None:
    """Put a text that a run acts on on the list of this user; the list does not hold the text itself."""
    _put_on_list(digest_of_text(key, text), key, os.environ)


def is_text_trusted(key: str, text: str, environ: Mapping[str, str]) -> bool:
    """Whether the user has named this text, or trusts everything in this command."""
    return environ.get(VARIABLE) == ALL or is_trusted(digest_of_text(key, text), environ)


def _put_on_list(digest: str, name: str, environ: Mapping[str, str]) -> None:
    if is_trusted(digest, environ):
        return
    folder = user_folder(environ) / FOLDER
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        (folder / digest).write_text(f"{name}\n", encoding="utf-8")
    if not is_trusted(digest, environ) and environ.get(VARIABLE) != ALL:
        digests = filter(None, (environ.get(VARIABLE, ""), digest))
        os.environ[VARIABLE] = ":".join(digests)


def has_changed(reference: str, environ: Mapping[str, str]) -> bool:
    """Whether the list has this reference, with whatever digest."""
    with contextlib.suppress(OSError):
        files = islice((user_folder(environ) / FOLDER).iterdir(), MAX_LISTED)
        return any(file.read_text(errors="replace") == f"{reference}\n" for file in files)
    return False


@contextlib.contextmanager
def trusting_all() -> Iterator[None]:
    """Code that stored files name runs meanwhile, in this process and those that it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = ALL
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def is_trusted(digest: str, environ: Mapping[str, str]) -> bool:
    """Whether this digest is on the list; one that others may write to does not count."""
    if digest in environ.get(VARIABLE, "").split(":"):
        return True
    folder = user_folder(environ) / FOLDER
    with contextlib.suppress(OSError):
        found = os.lstat(folder)
        is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
        return is_own and not found.st_mode & 0o022 and (folder / digest).is_file()
    return False


def _file_of(reference: str) -> Path | None:
    """The file of a module; nothing is imported, packages above it neither."""
    if reference.endswith(SUFFIX):
        path = Path(reference)
        return path.resolve() if path.is_file() else None
    top, *words = reference.split(".")
    name = top
    try:
        spec = importlib.util.find_spec(top)
        for word in words:
            name = f"{name}.{word}"
            folders = spec.submodule_search_locations if spec is not None else None
            spec = importlib.machinery.PathFinder.find_spec(name, folders) if folders else None
    except (ImportError, ValueError, AttributeError):
        return None
    origin = spec.origin if spec is not None and spec.has_location else None
    return Path(origin).resolve() if origin is not None and os.path.isfile(origin) else None
