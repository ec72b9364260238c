"""What users' code reads besides its arguments: environment variables and files, recorded while it is loaded, built and tried.

Note [Recorded reads]
    A read belongs to the code that asked for it: of an environment variable, the nearest caller
    outside of Python's own library; of a file, the nearest caller that is no library's, since
    libraries open files for users (`np.load`). Only users' reads count, so weft's own and those of
    imports do not; a module of a user that is imported meanwhile is a file that was read.

    Files are seen by Python's audit events, which no call can leave out and no hook can be removed
    from: one hook serves all recordings. The environment has none, so the lookup of `os.environ` is
    replaced while a recording is open. What C libraries open themselves is not seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from weft.code import source_loader
from weft.code.users_files import OWN_FOLDERS, WEFT_FOLDERS, is_users_file, package_of_file
from weft.code.values import DIGITS, short_digest

SYSTEM_FOLDERS = ("/dev/", "/proc/", "/sys/")
FOR_THEMSELVES = ("/torch/_inductor/", "/torch/_dynamo/", "/triton/", "/linecache.py")
"""They read caches of their own, and lines of sources for messages."""
WITHOUT_READS = (__file__, source_loader.__file__)
"""Files of weft between a user's code and what it reads."""
STARTS = frozenset({"subprocess.Popen", "os.exec", "os.posix_spawn", "os.system"})
CONNECTS = frozenset({"socket.connect", "urllib.Request"})
LINKS = "ctypes.dlopen"
EVENTS = frozenset({"open", LINKS, *STARTS, *CONNECTS})
MOST_BYTES = 2**30
WRITES = os.O_WRONLY | os.O_RDWR


@dataclass(eq=False)
class Reads:
    """What the code of one model has read so far; each is another one, whatever it has read.

    Args:
        packages: installed ones that are users'.

    Attributes:
        variables: environment variable -> digest of its value.
        files: path -> digest of its content.
        unknown: what was read and has no digest.
    """

    packages: frozenset[str] = frozenset()
    variables: dict[str, str] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    unknown: dict[str, None] = field(default_factory=dict)
    _opened: dict[str, None] = field(default_factory=dict)
    _written: set[str] = field(default_factory=set)

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record what all threads read; digests of files are made at the end."""
        _recordings.start(self)
        try:
            yield
        finally:
            _recordings.stop(self)
            self._digest_files()

    def note_variable(self, name: str, value: str | None) -> None:
        """An environment variable was looked up; None: it is not set."""
        if self._is_users(libraries=False):
            self.variables[name] = digest_of_variable(value)

    def note_environment(self) -> None:
        """All environment variables were listed."""
        if self._is_users(libraries=False):
            self.unknown["it lists all environment variables"] = None

    def note_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        """An audit event."""
        if not self._is_users(libraries=True):
            return
        if event == "open":
            self._note_file(*arguments)
        elif event == LINKS:
            self._note_file(arguments[0], None, os.O_RDONLY)
        elif event in STARTS:
            self.unknown[f"it starts a process: {arguments[0]}"] = None
        else:
            self.unknown["it connects to another process"] = None

    def _note_file(self, path: Any, mode: str | None, flags: int) -> None:
        """A file is opened."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return  # a descriptor that was opened before
        name = os.path.abspath(os.fsdecode(path))
        if name.endswith(".pyc"):
            with contextlib.suppress(ValueError):  # a file of this name elsewhere
                name = importlib.util.source_from_cache(name)
        is_own = package_of_file(name) or name.startswith((*OWN_FOLDERS, *SYSTEM_FOLDERS))
        if is_own and not is_users_file(name, self.packages):
            return
        if flags & WRITES:
            self._written.add(name)
        elif name not in self._written:
            self._opened[name] = None

    def _digest_files(self) -> None:
        for name in tuple(self._opened):  # another thread may open files still
            try:
                self.files[name] = digest_of_file(name)
            except ValueError as error:
                self.unknown[str(error)] = None
        self._opened.clear()

    def _is_users(self, *, libraries: bool) -> bool:
        """Whether a user's code asked for a read.

        Args:
            libraries: whether libraries may have read for it.
        """
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            file = frame.f_code.co_filename
            if file not in WITHOUT_READS and self._is_end(file, libraries=libraries):
                return is_users_file(file, self.packages)
            frame = frame.f_back
        return False

    def _is_end(self, file: str, *, libraries: bool) -> bool:
        """Whether the code of this file decides whose read it is."""
        if is_users_file(file, self.packages) or file.startswith(WEFT_FOLDERS):
            return True
        if any(part in file for part in FOR_THEMSELVES):
            return True
        return bool(package_of_file(file)) and not libraries


def digest_of_variable(value: str | None) -> str:
    """Of the value of an environment variable; None: it is not set."""
    return "not set" if value is None else short_digest(os.fsencode(value))


def digest_of_file(name: str) -> str:
    """Of the content of a file; "missing" where there is none.

    Raises:
        ValueError: it is too large, or no file that can be read again.
    """
    path = Path(name)
    if not path.exists():
        return "missing"
    if not path.is_file():
        raise ValueError(f"it reads {path.name}, which is no regular file")
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"it reads {path.name}, which is larger than {MOST_BYTES:,} bytes")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGITS]


@dataclass
class _Recordings:
    """The recordings that are open in this process; see Note [Recorded reads]."""

    _open: list[Reads] = field(default_factory=list)
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _has_hook: bool = False

    def start(self, reads: Reads) -> None:
        """Record reads into `reads` from now on."""
        with self._lock:
            if not self._has_hook:
                _add_hook(self._open)
                self._has_hook = True
            if not self._open:
                setattr(os._Environ, "__getitem__", _recorded_lookup)  # noqa: B010 - a method
                setattr(os._Environ, "__iter__", _recorded_listing)  # noqa: B010 - a method
            self._open.append(reads)

    def stop(self, reads: Reads) -> None:
        """Record nothing more into `reads`."""
        with self._lock:
            self._open.remove(reads)
            if not self._open:
                setattr(os._Environ, "__getitem__", _lookup)  # noqa: B010 - a method
                setattr(os._Environ, "__iter__", _listing)  # noqa: B010 - a method

    def note_variable(self, name: str | bytes, value: str | bytes | None) -> None:
        """An environment variable was looked up."""
        for reads in tuple(self._open):
            reads.note_variable(os.fsdecode(name), None if value is None else os.fsdecode(value))

    def note_environment(self) -> None:
        """All environment variables were listed."""
        for reads in tuple(self._open):
            reads.note_environment()


def _add_hook(recordings: list[Reads]) -> None:
    """Tell all recordings of audit events, for ever: a plain function costs 0.25 us an event, of
    which a training step has some tens.
    """

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if recordings and event in EVENTS:
            for reads in tuple(recordings):
                reads.note_event(event, arguments)

    sys.addaudithook(on_event)


_lookup = os._Environ.__getitem__
_listing = os._Environ.__iter__


def _recorded_lookup(environment: Any, name: Any) -> Any:
    """In place of `os.environ[name]` while a recording is open."""
    try:
        value = _lookup(environment, name)
    except KeyError:
        _recordings.note_variable(name, None)
        raise
    _recordings.note_variable(name, value)
    return value


def _recorded_listing(environment: Any) -> Iterator[Any]:
    """In place of `iter(os.environ)` while a recording is open."""
    _recordings.note_environment()
    return _listing(environment)


_recordings = _Recordings()
