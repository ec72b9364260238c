"""Files behind URLs: downloaded into a cache folder of bounded size, by requests that continue where they broke off.

    https://host/shard-{000..009}.tar         files of a web server; braces number them
    s3://bucket/texts/*.jsonl.gz              files of any file system of fsspec: s3, gs, hf, memory, file

A file of the cache is whole or absent. It is found again by its URL, and by the version that a file
system states for it, until newer ones need its place.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import astuple, dataclass
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from weft.data.files import KEY, READ_SUFFIXES, check_one_kind, find_files, inner_name
from weft.errors import DataError, Fault, first_line
from weft.file_systems import EXTRAS, open_file_system
from weft.small_files import user_folder

WEB = ("http", "https")
CACHE = "data"
LOCK = ".lock"
USE = ".use"
"""Of a folder of the cache: what downloads into it locks the first, what reads files of it the other."""
ANSWER = ".answer"
"""Files that a URL named, as JSON."""
CACHE_VARIABLE = "WEFT_CACHE_GIB"
CACHE_GIB = 50.0
GIB = 2**30
BLOCK_BYTES = 2**20
REQUEST_BYTES = 2**24
"""Bytes that a file system asks for at a time: what breaks off loses no more."""
ATTEMPTS = 5
"""Requests in a row that bring nothing before a download fails."""
PAUSE_S = 0.5
"""Before the second attempt; twice as long before each further one."""
TIMEOUT_S = 30.0
SILENCE_S = 120.0
"""A store that did not answer is not asked again for so long, if the cache has what it answered last."""
SAME_COMMAND_S = 1.0
"""If the cache has not, its error is raised again: a command asks several times in a row."""
LASTING_CODES = (400, 401, 403, 404, 405, 410)
"""Answers of a web server that another attempt does not change."""
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "mtime")
"""What file systems tell of a file, one by one and in lists, that another content changes; the first
is taken.
"""
PAGE = "text/html"
LASTING_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)
NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
PARTIAL = 206

_FAILURES: dict[tuple[str, ...], tuple[float, Exception]] = {}
"""Protocol and host of a URL -> when its file system did not answer in this process, on the monotonic
clock, and its error.
"""


def is_url(source: str) -> bool:
    """Whether a source is named by a URL."""
    protocol, separator, _ = source.partition("://")
    return bool(separator) and protocol.replace("+", "").isalnum()


def source_files(source: str) -> tuple[Path, ...]:
    """The files of a data source: as `find_files`; those of a URL are in the cache.

    Raises:
        DataError: as `find_files` and `fetch_all`.
    """
    if not is_url(source):
        return find_files(source)
    files = fetch_all(source)
    check_one_kind(source, files)
    return files


@dataclass(frozen=True)
class RemoteFile:
    """A file behind a URL, which is downloaded when it is read.

    Attributes:
        version: that a file system states for its content; "": none.
        place: of a folder whose files lie together in the cache; "": this file lies alone.
    """

    url: str
    version: str = ""
    place: str = ""

    def __str__(self) -> str:
        return self.url

    @property
    def num_bytes(self) -> int:
        """Size of the cached file; 0 before it is downloaded."""
        return self.path.stat().st_size if self.path.exists() else 0

    @property
    def path(self) -> Path:
        """Its place in the cache, with the name that the URL ends with."""
        name = UNSAFE.sub("-", urlsplit(self.url).path.rpartition("/")[2]) or "file"
        place = self.place or f"{self.url}{self.version}"
        return _root() / _digest(place) / name

    def fetched(self) -> Path:
        """The file in the cache; it is downloaded where it is not there. Other processes that want it
        wait.

        Raises:
            DataError: it cannot be downloaded, or has no place.
        """
        path = self.path
        # under the lock: of the ranks of a host one downloads, and the others find the file when they hold it
        with _locked(path.parent):
            if not path.exists():
                part = path.with_name(f".{path.name}.part")
                try:
                    _download(self, part)
                except DataError:
                    if not self.version:  # the next start could not tell what it is of
                        part.unlink(missing_ok=True)
                    raise
                # the name appears with the whole content: a process that finds it may read it without the lock
                part.rename(path)
            os.utime(path)  # the last use
        return path

    @contextmanager
    def in_use(self) -> Iterator[Path]:
        """The file in the cache, as `fetched`; inside the block no process makes room with it.

        Raises:
            DataError: as `fetched`.
        """
        while True:
            path = self.fetched()
            # another process may remove the folder before this lock is held: then it is fetched again
            with ExitStack() as stack, suppress(FileNotFoundError):
                use = stack.enter_context((path.parent / USE).open("a"))
                fcntl.flock(use, fcntl.LOCK_SH)
                path.stat()
                held = stack.pop_all()
                break
        with held:
            yield path

    def beside(self, name: str) -> RemoteFile:
        """Another file of its folder, which is downloaded to the same place."""
        return RemoteFile(f"{self.url.rpartition('/')[0]}/{name}", place=self.place)


def file_of_folder(folder: str, name: str) -> RemoteFile | None:
    """A file of a folder behind a URL; None: it is not there. The folder's place in the cache is of
    the version of this file.
    """
    url = f"{folder}/{name}"
    protocol = url.partition("://")[0]
    if protocol in WEB:
        found = RemoteFile(url, place=folder)
        return found if found.path.exists() or _answers(url) else None

    def ask() -> Iterator[RemoteFile]:
        fs, path = _file_system(url)
        version = _version(fs.info(path))
        yield RemoteFile(url, version, f"{folder}{version}")

    try:
        return _asked(url, ask)[0]
    except Exception:  # noqa: BLE001 - the list of the folder's files says what is wrong
        return None


def remote_files(source: str) -> tuple[RemoteFile, ...]:
    """The files that a URL names, sorted: by a pattern, or a folder, of a file system; by numbers in
    braces.

    Raises:
        DataError: none, or the file system cannot be opened.
    """
    protocol = source.partition("://")[0]
    urls = _numbered(source)
    if protocol in WEB:
        return tuple(map(RemoteFile, urls))
    with _file_system_errors(source):
        files = _asked(source, lambda: (file for url in urls for file in _listed(url)))
    if not files:
        raise DataError(Fault(KEY, "no file matches", got=repr(source), fix="check the URL"))
    return files


def _asked(url: str, ask: Callable[[], Iterator[RemoteFile]]) -> tuple[RemoteFile, ...]:
    """What a file system answers; where it is not there, what it answered last, if the cache has all of
    that: ranks start again without it, and a warning says so.
    """
    last = _root() / _digest(url) / ANSWER
    store = urlsplit(url)[:2]
    failed_at_s, failure = _FAILURES.get(store, (-math.inf, None))
    silent_s = time.monotonic() - failed_at_s
    if failure is not None and silent_s < SILENCE_S:
        files = _known(last)
        if files:
            _warn_of_cache(url, failure)
            return files
        if silent_s < SAME_COMMAND_S:
            raise failure
    try:
        found = tuple(ask())
    except (*LASTING_ERRORS, ImportError, ValueError):
        raise
    except Exception as error:
        _FAILURES[store] = time.monotonic(), error
        files = _known(last)
        if not files:
            raise
        _warn_of_cache(url, error)
        return files
    _FAILURES.pop(store, None)
    if found:
        last.parent.mkdir(parents=True, exist_ok=True)
        # several ranks write the answer at once: each to a file of its own, and every rename leaves a whole one
        with NamedTemporaryFile("w", dir=last.parent, prefix=ANSWER, delete=False) as new:
            json.dump([astuple(file) for file in found], new)
        Path(new.name).rename(last)
    return found


def _warn_of_cache(url: str, error: Exception) -> None:
    """Not silent: the store may hold newer files by now. Python shows equal warnings once."""
    said = f"{url} cannot be reached ({first_line(error)}): its files in the cache are read"
    warnings.warn(said, stacklevel=3)


def _known(answer: Path) -> tuple[RemoteFile, ...]:
    """The files of the last answer; none if the cache has not all of them."""
    if not answer.exists():
        return ()
    known = json.loads(answer.read_text(encoding="utf-8"))
    files = tuple(RemoteFile(*each) for each in known)
    return files if all(file.path.exists() for file in files) else ()


def fetch_all(source: str) -> tuple[Path, ...]:
    """All files of a URL in the cache, which must have room for them together.

    Raises:
        DataError: as `RemoteFile.fetched`; or they are larger than the cache.
    """
    paths = []
    for file in remote_files(source):
        paths.append(file.fetched())
        num_bytes = sum(path.stat().st_size for path in paths)
        if num_bytes > _limit_bytes():
            what = f"{source} is larger than the cache {_root()}"
            need = f"at most {_limit_bytes() / GIB:g} GiB = {CACHE_VARIABLE}"
            fix = (
                "weft data prepare INPUT --out FOLDER, which reads file by file, or a larger cache"
            )
            raise DataError(Fault(KEY, what, got=f"{num_bytes / GIB:.3g} GiB", need=need, fix=fix))
    make_room(keep=frozenset(paths))
    return tuple(paths)


def make_room(*, keep: frozenset[Path] = frozenset()) -> None:
    """Remove files from the cache that were not used for the longest time, until it is within its
    bound.

    Args:
        keep: files that stay.
    """
    uses = {folder: _use_of(folder) for folder in _root().glob("*")}
    num_bytes = sum(use.num_bytes for use in uses.values())
    kept = {path.parent for path in keep}
    for folder in sorted(uses.keys() - kept, key=lambda folder: uses[folder].last_s):
        if num_bytes <= _limit_bytes():
            return
        # counted as freed even where it stays, because a process uses it: no other folder is removed for it
        num_bytes -= uses[folder].num_bytes
        _remove(folder)


@dataclass(frozen=True)
class _FolderUse:
    """Bytes of a folder of the cache, and the time of its last use, s."""

    num_bytes: int
    last_s: float


def _use_of(folder: Path) -> _FolderUse:
    num_bytes, last_s = 0, 0.0
    with suppress(OSError):  # another process may remove the folder meanwhile
        for name in os.listdir(folder):
            if name not in (LOCK, USE):
                with suppress(FileNotFoundError):  # or have its download whole
                    stat = (folder / name).stat()
                    num_bytes, last_s = num_bytes + stat.st_size, max(last_s, stat.st_mtime)
    return _FolderUse(num_bytes, last_s)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of the cache, which is made where it is not there."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # the folder may be removed before its lock is open, or while this process waits for it:
        # then others lock another file of that name
        with ExitStack() as stack, suppress(FileNotFoundError):
            lock = stack.enter_context((folder / LOCK).open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(lock.fileno()), os.stat(folder / LOCK)):
                held = stack.pop_all()
                break
    with held:
        yield


def _remove(folder: Path) -> None:
    """Remove a folder of the cache, unless a process downloads into it or reads a file of it."""
    with suppress(OSError), ExitStack() as stack:
        for name in (LOCK, USE):
            lock = stack.enter_context((folder / name).open("a"))
            # not waited for: a folder in use is one that must stay
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    return user_folder(os.environ) / CACHE


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _limit_bytes() -> float:
    text = os.environ.get(CACHE_VARIABLE, str(CACHE_GIB))
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not size > 0:
        need = "a number of GiB above 0"
        raise DataError(Fault(CACHE_VARIABLE, "is no size", got=repr(text), need=need))
    return size * GIB


def _numbered(url: str) -> Iterator[str]:
    """The URLs of `NAME{000..009}`: all numbers, with as many digits."""
    match = NUMBERS.search(url)
    if match is None:
        yield url
        return
    first, last = match.groups()
    for number in range(int(first), int(last) + 1):
        yield from _numbered(f"{url[: match.start()]}{number:0{len(first)}}{url[match.end() :]}")


def _listed(url: str) -> list[RemoteFile]:
    """The files of a pattern or folder of a file system; another URL is one file."""
    fs, path = _file_system(url)
    if any(sign in path for sign in "*?["):
        found = fs.glob(path, detail=True)
    elif fs.isdir(path):
        found = {
            name: info for name, info in fs.find(path, detail=True).items() if _is_read(Path(name))
        }
    else:
        return [RemoteFile(url, _version(fs.info(path)))]
    return [RemoteFile(fs.unstrip_protocol(name), _version(found[name])) for name in sorted(found)]


def _is_read(file: Path) -> bool:
    """Whether a file of a folder is read, as in folders on a disk."""
    return not file.name.startswith(".") and inner_name(file).endswith(READ_SUFFIXES)


def _version(info: Mapping[str, Any]) -> str:
    """What is another text where a file has another content; "" where the file system cannot tell."""
    found = next((str(info[key]) for key in VERSION_KEYS if info.get(key)), "")
    return f"{found} {info.get('size')}" if found else ""


def _file_system(url: str) -> tuple[Any, str]:
    if find_spec("fsspec") is None:
        fix = "pip install 'weft-train[remote]'"
        raise DataError(Fault(KEY, f"{url}: fsspec is not installed", fix=fix))
    return open_file_system(url)


@contextmanager
def _file_system_errors(url: str) -> Iterator[None]:
    """Any error of a file system as one line."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # noqa: BLE001 - every file system has errors of its own
        protocol = url.partition("://")[0]
        fix = "check the URL and the credentials"
        if isinstance(error, ImportError):
            extra = EXTRAS.get(protocol)
            fix = f"pip install 'weft-train[{extra}]'" if extra else "install its package"
        got = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(Fault(KEY, f"{url} cannot be read", got=got, fix=fix)) from None


@dataclass(frozen=True)
class _Opened:
    """The content of a file from a place on.

    Attributes:
        start: place of the first byte; 0 where the server does not continue.
        size: of the whole file; None: unknown.
        version: another for a later content of the URL; "" where there is none.
    """

    content: IO[bytes]
    start: int
    size: int | None
    version: str


def _open_web(url: str, start: int, version: str) -> _Opened:
    headers = {"User-Agent": "weft"}
    # asks for the rest only if the content is still of that version; else the server sends all of it
    if start:
        headers |= {"Range": f"bytes={start}-", **({"If-Range": version} if version else {})}
    answer = urlopen(Request(url, headers=headers), timeout=TIMEOUT_S)  # noqa: S310 - http or https
    first = start if answer.status == PARTIAL else 0
    length = answer.headers.get("Content-Length")
    version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    size = None if length is None else first + int(length)
    is_page = answer.headers.get_content_type() == PAGE
    if is_page and not urlsplit(url).path.endswith((".html", ".htm")):
        answer.close()
        fix = "the address of the file itself; files are numbered in braces: part-{000..009}.jsonl"
        raise DataError(Fault(KEY, f"{url} is a page, not a file", got=PAGE, fix=fix))
    return _Opened(answer, first, size, "" if version.startswith("W/") else version)


def _open_file_system(url: str, start: int, version: str) -> _Opened:
    fs, path = _file_system(url)
    if start:
        # its list of files may be older than the content that has changed since
        fs.invalidate_cache()
    info = fs.info(path)
    found = _version(info)
    content = fs.open(path, "rb", block_size=REQUEST_BYTES)
    first = start if found == version else 0
    content.seek(first)
    return _Opened(content, first, info.get("size"), found)


def _answers(url: str) -> bool:
    """Whether a web server has a file."""
    asked = Request(url, headers={"User-Agent": "weft"}, method="HEAD")  # noqa: S310 - http or https
    try:
        with urlopen(asked, timeout=TIMEOUT_S) as answer:  # noqa: S310
            return bool(answer.headers.get_content_type() != PAGE)
    except (OSError, HTTPException):
        return False


def _download(file: RemoteFile, part: Path) -> None:
    """Download a file; what broke off is continued, after pauses, as long as something comes. Of a
    version that a file system states it is continued by the next start, too.

    Raises:
        DataError: it is not there, or nothing comes any more.
    """
    url = file.url
    is_web = url.partition("://")[0] in WEB
    opener: Callable[[str, int, str], _Opened] = _open_web if is_web else _open_file_system
    version, num_failed, place = file.version, 0, 0
    if version and part.exists():
        place = part.stat().st_size
    while True:
        before = place
        why: str
        try:
            opened = opener(url, place, version)
            if file.version not in ("", opened.version):
                raise DataError(Fault(KEY, f"{url} has changed meanwhile", fix="start again"))
            version, place = opened.version, opened.start
            with opened.content as content, part.open("r+b" if place else "wb") as out:
                # of a content from its beginning nothing of the former one may stay behind it
                out.truncate(place)
                out.seek(place)
                while block := content.read(BLOCK_BYTES):
                    out.write(block)
                    place += len(block)
            if opened.size is None or place == opened.size:
                return
            why = f"{place:,} of {opened.size:,} bytes came"
        except DataError:
            raise
        except Exception as error:  # noqa: BLE001 - every file system has errors of its own
            why = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, HTTPError):
                error.close()
            is_lasting = isinstance(error, (*LASTING_ERRORS, ImportError, ValueError)) or (
                isinstance(error, HTTPError) and error.code in LASTING_CODES
            )
            if is_lasting and not isinstance(error, HTTPException):
                _fail(url, why, error)
        # a slow or flaky line may break off any number of times, as long as something comes each time
        num_failed = 0 if place > before else num_failed + 1
        if num_failed >= ATTEMPTS:
            _fail(url, f"{why}, {ATTEMPTS} times in a row", None)
        time.sleep(PAUSE_S * 2**num_failed)


def _fail(url: str, why: str, error: Exception | None) -> None:
    if isinstance(error, ImportError):
        with _file_system_errors(url):
            raise error
    fix = "check the URL, the network and the credentials, and start again"
    raise DataError(Fault(KEY, f"{url} cannot be downloaded", got=why, fix=fix)) from None
