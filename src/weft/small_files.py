"""Reads small files of unknown origin (configs, manifests): regular files, limited in size, nesting and digits. No torch."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from weft.errors import Fault

MIB = 2**20
MAX_DEPTH = 64
"""Levels of nesting of a JSON or TOML document."""
MAX_DIGITS = 40
"""Digits of a whole number: none that a file holds for a reason is longer."""
MAX_KEY_PARTS = 64
"""Parts of a dotted TOML key; the parser of the standard library takes cubic time for long ones."""
SNAPSHOTS, BLOBS = "snapshots", "blobs"
"""Folders of the Hugging Face hub's cache: files in snapshots/REVISION are links to blobs."""

CACHE_VARIABLE = "XDG_CACHE_HOME"

_LONG_NUMBER = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_TOML_KEY_END = re.compile(r"[=\[{,\"']")


class UnreadableFile(Exception):  # noqa: N818 - not an error of the program: why a file is rejected
    """Why a small file is rejected.

    Attributes:
        what: the reason, to stand behind the name of the file.
        is_missing: there is no such file.
    """

    def __init__(
        self, path: Path, what: str, *, got: str = "", need: str = "", is_missing: bool = False
    ) -> None:
        self.path, self.what, self.got, self.need = path, what, got, need
        self.is_missing = is_missing
        super().__init__(f"{path}: {what}")

    def fault(self, key: str = "", *, fix: str = "") -> Fault:
        """The fault of this file; without a `key` its path is the key, without a `fix` it is to
        check path or file.
        """
        what = f"{self.path}: {self.what}" if key else self.what
        if not fix:
            fix = "check the path" if self.is_missing else "check the file"
        return Fault(key or str(self.path), what, got=self.got, need=self.need, fix=fix)


def user_folder(environ: Mapping[str, str]) -> Path:
    """Where this user's own records are: verdicts of proofs, code that was run."""
    base = Path(environ.get(CACHE_VARIABLE, ""))
    if not base.is_absolute():
        base = Path.home() / ".cache"
    return base / "weft"


def open_regular(path: Path, *, within: Path | None = None) -> IO[bytes]:
    """Open a regular file for reading; pipes, devices, sockets and folders are rejected unread.

    Args:
        within: a symbolic link may lead to a file of this folder, or to the blobs of the hub's
            cache that the folder is part of. None: the user has named the file, and it may be a
            link.

    Raises:
        UnreadableFile: it is missing, unreadable, no regular file, or a link that leads elsewhere.
    """
    try:
        real = Path(os.path.realpath(path))
        if within is not None:
            _check_location(path, real, within)
        if not stat.S_ISREG(os.stat(real).st_mode):  # opening a device may have effects
            raise UnreadableFile(path, "is no regular file", need="a regular file")
        descriptor = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise UnreadableFile(path, "no such file", is_missing=True) from None
    except NotADirectoryError:
        raise UnreadableFile(path, "no such file", is_missing=True) from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise UnreadableFile(path, "cannot be read", got=why) from None
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    raise UnreadableFile(path, "is no regular file", need="a regular file")


def read_bytes(path: Path, *, max_bytes: int, within: Path | None = None) -> bytes:
    """The content of a small file.

    Raises:
        UnreadableFile: as `open_regular`, or it is larger than `max_bytes`.
    """
    with open_regular(path, within=within) as file:
        try:
            content = file.read(max_bytes + 1)
        except OSError as error:
            got = error.strerror or str(error)
            raise UnreadableFile(path, "cannot be read", got=got) from None
    if len(content) > max_bytes:
        got, need = f"over {max_bytes} bytes", f"at most {max_bytes}"
        raise UnreadableFile(path, "is too large", got=got, need=need)
    return content


def read_text(path: Path, *, max_bytes: int, within: Path | None = None) -> str:
    """The content of a small UTF-8 file.

    Raises:
        UnreadableFile: as `read_bytes`, or it is not UTF-8.
    """
    content = read_bytes(path, max_bytes=max_bytes, within=within)
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 text at byte {error.start}"
        raise UnreadableFile(path, what, need="UTF-8 text") from None


def read_json(path: Path, *, max_bytes: int, within: Path | None = None) -> Any:
    """The value of a small JSON file.

    Raises:
        UnreadableFile: as `read_text`, or it is no JSON within the limits.
    """
    text = read_text(path, max_bytes=max_bytes, within=within)
    try:
        return parse_json(text)
    except ValueError as error:
        raise UnreadableFile(path, "is no JSON", got=str(error)) from None


def read_json_object(path: Path, *, max_bytes: int, within: Path | None = None) -> dict[str, Any]:
    """The value of a small JSON file that holds an object.

    Raises:
        UnreadableFile: as `read_json`, or it holds another value.
    """
    content = read_json(path, max_bytes=max_bytes, within=within)
    if not isinstance(content, dict):
        raise UnreadableFile(path, "is no JSON object", got=type(content).__name__)
    return content


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is no JSON, not UTF-8, nested too deeply, or holds a number that is too long.
    """
    if isinstance(text, bytes):
        text = text.decode()
    long_numbers = _LONG_NUMBER.search(text)
    try:
        value = json.loads(text, parse_int=_short_int) if long_numbers else json.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(value)
    return value


def parse_toml(text: str) -> dict[str, Any]:
    """The table of a TOML text.

    Raises:
        ValueError: it is no TOML (then a `tomllib.TOMLDecodeError`), nested too deeply, or holds a
            number that is too long.
    """
    _check_key_parts(text)
    try:
        value = tomllib.loads(text)
    except RecursionError:
        raise ValueError(_too_deep()) from None
    _check_depth(value)
    _check_digits(value)
    return value


def capped_lines(file: IO[bytes], *, max_bytes: int) -> Iterator[bytes]:
    """The lines of an open file with their ends; memory stays bounded whatever the file holds.

    Raises:
        ValueError: a line is longer than `max_bytes`.
    """
    while line := file.readline(max_bytes + 1):
        if len(line) > max_bytes:
            raise ValueError(f"a line of over {max_bytes} bytes")
        yield line


def is_regular_within(path: Path, folder: Path) -> bool:
    """Whether there is a regular file that `open_regular(path, within=folder)` would open."""
    try:
        open_regular(path, within=folder).close()
    except UnreadableFile:
        return False
    return True


def _check_location(path: Path, real: Path, folder: Path) -> None:
    """Check that the target of a path lies in `folder` or in the blobs of its hub cache."""
    home = Path(os.path.realpath(folder))
    if real.is_relative_to(home):
        return
    for parent in (home, *home.parents):
        if parent.parent.name == SNAPSHOTS and real.is_relative_to(parent.parent.parent / BLOBS):
            return
    need = f"a file, or a link inside {folder}"
    raise UnreadableFile(path, "is a link that leads out of its folder", need=need)


def _too_deep() -> str:
    return f"nested more than {MAX_DEPTH} levels deep"


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        inner: list[Any] = []
        for container in level:
            members = container.values() if isinstance(container, dict) else container
            if isinstance(container, (dict, list)):
                inner += [member for member in members if isinstance(member, (dict, list))]
        if not inner:
            return
        level = inner
    raise ValueError(_too_deep())


def _short_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _check_digits(value: Any) -> None:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
        elif isinstance(item, list):
            pending += item
        elif isinstance(item, int) and abs(item) >= 10**MAX_DIGITS:
            raise ValueError(f"a number of more than {MAX_DIGITS} digits")


def _check_key_parts(text: str) -> None:
    for line in text.splitlines():
        if line.count(".") < MAX_KEY_PARTS:
            continue
        for part in _TOML_KEY_END.split(line.partition("#")[0]):
            if part.count(".") >= MAX_KEY_PARTS:
                raise ValueError(_too_deep())
