"""Files behind URLs: downloaded into a cache folder of bounded size, by requests that continue where they broke off.

    https://host/shard-{000..009}.tar         files of a web server; braces number them
    s3://bucket/texts/*.jsonl.gz              files of any file system of fsspec: s3, gs, hf, memory, file

A file of the cache is whole or absent. It is found again by its URL, until newer ones need its place.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from weft.data.files import KEY, check_one_kind, find_files
from weft.errors import DataError, Fault, first_line
from weft.small_files import user_folder

WEB = ("http", "https")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "hf": "hub"}
"""Protocol -> extra of this package that installs its file system."""
CACHE = "data"
CACHE_VARIABLE = "WEFT_CACHE_GIB"
CACHE_GIB = 50.0
GIB = 2**30
BLOCK_BYTES = 2**20
ATTEMPTS = 5
"""Requests in a row that bring nothing before a download fails."""
PAUSE_S = 0.5
"""Before the second attempt; twice as long before each further one."""
TIMEOUT_S = 30.0
LASTING_CODES = (400, 401, 403, 404, 405, 410)
"""Answers of a web server that another attempt does not change."""
LASTING_ERRORS = (FileNotFoundError, PermissionError, IsADirectoryError)
NUMBERS = re.compile(r"\{(\d+)\.\.(\d+)\}")
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
PARTIAL = 206


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
    """A file behind a URL, which is downloaded when it is read."""

    url: str

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
        digest = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        return user_folder(os.environ) / CACHE / digest / name

    def fetched(self) -> Path:
        """The file in the cache; it is downloaded where it is not there. Other processes that want it
        wait.

        Raises:
            DataError: it cannot be downloaded, or has no place.
        """
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                part = path.with_name(f".{path.name}.part")
                _download(self.url, part)
                part.rename(path)
            os.utime(path)  # the last use
        return path


def remote_files(source: str) -> tuple[RemoteFile, ...]:
    """The files that a URL names, sorted: by a pattern, or a folder, of a file system; by numbers in
    braces.

    Raises:
        DataError: none, or the file system cannot be opened.
    """
    protocol = source.partition("://")[0]
    urls = tuple(_numbered(source))
    if protocol not in WEB:
        with _file_system_errors(source):
            urls = tuple(found for url in urls for found in _listed(url))
    if not urls:
        raise DataError(Fault(KEY, "no file matches", got=repr(source), fix="check the URL"))
    return tuple(map(RemoteFile, urls))


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
    files = [path for path in _root().glob("*/*") if not path.name.startswith(".")]
    num_bytes = sum(path.stat().st_size for path in files)
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        if num_bytes <= _limit_bytes():
            return
        if path not in keep:
            num_bytes -= path.stat().st_size
            shutil.rmtree(path.parent)


def _root() -> Path:
    return user_folder(os.environ) / CACHE


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


def _listed(url: str) -> list[str]:
    """The files of a pattern or folder of a file system; another URL is one file."""
    fs, path = _file_system(url)
    if any(sign in path for sign in "*?["):
        found = fs.glob(path)
    elif fs.isdir(path):
        found = [name for name in fs.find(path) if not Path(name).name.startswith(".")]
    else:
        return [url]
    return sorted(fs.unstrip_protocol(name) for name in found)


def _file_system(url: str) -> tuple[Any, str]:
    try:
        core = importlib.import_module("fsspec.core")
    except ImportError:
        fix = "pip install 'weft-train[remote]'"
        raise DataError(Fault(KEY, f"{url}: fsspec is not installed", fix=fix)) from None
    return core.url_to_fs(url)  # type: ignore[no-any-return]  # fsspec has no types


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
        version: that tells this content from a later one of the URL; "" where there is none.
    """

    content: IO[bytes]
    start: int
    size: int | None
    version: str


def _open_web(url: str, start: int, version: str) -> _Opened:
    headers = {"User-Agent": "weft"}
    if start:
        headers |= {"Range": f"bytes={start}-", **({"If-Range": version} if version else {})}
    answer = urlopen(Request(url, headers=headers), timeout=TIMEOUT_S)  # noqa: S310 - http or https
    first = start if answer.status == PARTIAL else 0
    length = answer.headers.get("Content-Length")
    version = answer.headers.get("ETag") or answer.headers.get("Last-Modified") or ""
    size = None if length is None else first + int(length)
    return _Opened(answer, first, size, "" if version.startswith("W/") else version)


def _open_file_system(url: str, start: int, version: str) -> _Opened:
    fs, path = _file_system(url)
    info = fs.info(path)
    found = str(info.get("ETag") or info.get("mtime") or info.get("LastModified") or "")
    content = fs.open(path, "rb")
    first = start if found == version else 0
    content.seek(first)
    return _Opened(content, first, info.get("size"), found)


def _download(url: str, part: Path) -> None:
    """Download a file; what broke off is continued, after pauses, as long as something comes.

    Raises:
        DataError: it is not there, or nothing comes any more.
    """
    is_web = url.partition("://")[0] in WEB
    opener: Callable[[str, int, str], _Opened] = _open_web if is_web else _open_file_system
    version, num_failed, place = "", 0, 0
    part.unlink(missing_ok=True)
    while True:
        before = place
        why: str
        try:
            opened = opener(url, place, version)
            version, place = opened.version, opened.start
            with opened.content as content, part.open("r+b" if place else "wb") as out:
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
                _fail(url, why, part, error)
        num_failed = 0 if place > before else num_failed + 1
        if num_failed >= ATTEMPTS:
            _fail(url, f"{why}, {ATTEMPTS} times in a row", part, None)
        time.sleep(PAUSE_S * 2**num_failed)


def _fail(url: str, why: str, part: Path, error: Exception | None) -> None:
    part.unlink(missing_ok=True)
    if isinstance(error, ImportError):
        with _file_system_errors(url):
            raise error
    fix = "check the URL, the network and the credentials, and start again"
    raise DataError(Fault(KEY, f"{url} cannot be downloaded", got=why, fix=fix)) from None
