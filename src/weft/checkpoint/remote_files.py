"""Files below a URL of any fsspec file system: requests that are repeated, downloads that are whole or absent."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from weft.checkpoint.remote_url import KEY, url_faults
from weft.errors import CheckpointError, Fault
from weft.file_systems import open_file_system

PART = ".part"
"""Ending of a file while it is downloaded."""
ATTEMPTS = 3
PAUSE_S = 1.0
"""Before the second attempt of a request; twice as long before each further one."""
MAX_REASON_CHARS = 300
LASTING_ERRORS = frozenset({"PermissionError", "NoCredentialsError", "NoSuchBucket"})
"""Names of errors that another attempt does not change."""
CREDENTIALS_FIX = "set the credentials that the file system reads, such as AWS_ACCESS_KEY_ID, and the rights to write"
SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|_KEY", re.IGNORECASE)
"""In names of environment variables."""
MIN_SECRET_CHARS = 8
SIGNED_QUERY = re.compile(
    r"([?&](?:X-Amz-|X-Goog-)?(?:Signature|Credential|Security-Token|sig|token)=)[^&\s\"']+",
    re.IGNORECASE,
)
HIDDEN = "***"

T = TypeVar("T")


@dataclass(frozen=True)
class RemoteFiles:
    """The files below a URL; every method raises `CheckpointError` if a request fails again and again.

    Attributes:
        fs: the fsspec file system.
        root: the folder within it.
    """

    url: str
    fs: Any
    root: str

    @staticmethod
    def open(url: str) -> RemoteFiles:
        """Open the file system of a URL.

        Raises:
            CheckpointError: it cannot be opened.
        """
        faults = tuple(url_faults(url))
        if faults:
            raise CheckpointError(*faults)
        with _request_errors(url, "cannot be opened"):
            fs, root = open_file_system(url, skip_instance_cache=True)
        return RemoteFiles(url=url.rstrip("/"), fs=fs, root=root.rstrip("/"))

    def path(self, *names: str) -> str:
        """A path within the file system."""
        return "/".join((self.root, *names))

    def refresh(self) -> None:
        """Forget listings: other processes may have written."""
        self.fs.invalidate_cache()

    def names(self, *parts: str) -> list[str]:
        """Entries of a folder, sorted; none if there is no folder."""
        return sorted(self.sizes(*parts))

    def sizes(self, *parts: str) -> dict[str, int]:
        """Name -> bytes of the entries of a folder, in which a folder has 0."""
        folder = self.path(*parts)

        def list_entries() -> list[dict[str, Any]]:
            try:
                return list(self.fs.ls(folder, detail=True))
            except FileNotFoundError:
                return []

        sizes: dict[str, int] = {}
        for entry in self._try("cannot be listed", list_entries):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            sizes[name] = entry.get("size") or 0
        return sizes

    def read(self, *parts: str) -> bytes | None:
        """The content of a small file; None if there is none."""
        path = self.path(*parts)

        def read() -> bytes | None:
            try:
                content: bytes = self.fs.cat_file(path)
            except FileNotFoundError:
                return None
            return content

        return self._try("cannot be read", read)

    def write(self, content: bytes, *parts: str) -> None:
        """Write a small file."""
        path = self.path(*parts)
        self._try("cannot be written", partial(self.fs.pipe_file, path, content))
        self.refresh()

    def make_folder(self, *parts: str) -> None:
        """Make a folder; object stores need none."""
        path = self.path(*parts)
        self._try("cannot be made", partial(self.fs.makedirs, path, exist_ok=True))

    def remove(self, *parts: str) -> None:
        """Remove a file, if it is there."""
        path = self.path(*parts)

        def remove() -> None:
            with suppress(FileNotFoundError):
                self.fs.rm_file(path)

        self._try("cannot be removed", remove)
        self.refresh()

    def remove_folder(self, *parts: str) -> None:
        """Remove a folder with its files."""
        path = self.path(*parts)
        self._try("cannot be removed", partial(self.fs.rm, path, recursive=True))

    def put(self, source: Path, *parts: str, is_growing: bool = False) -> None:
        """Upload a file, and check its length."""
        target = self.path(*parts)

        def put() -> None:
            self.fs.put_file(str(source), target)
            if is_growing:
                return
            self.refresh()
            num_bytes = source.stat().st_size
            num_arrived = self.fs.info(target)["size"]
            if num_arrived != num_bytes:
                raise OSError(f"{num_arrived} of {num_bytes} bytes have arrived")

        self._try("cannot be uploaded", put)

    def get(self, target: Path, *parts: str) -> None:
        """Download a file whole: to another name, then renamed."""
        source = self.path(*parts)
        part = target.with_name(target.name + PART)

        def get() -> None:
            self.fs.get_file(source, str(part))
            part.replace(target)

        self._try("cannot be downloaded", get)

    def _try(self, what: str, request: Callable[[], T]) -> T:
        """The result of a request, which is repeated if it fails and may succeed later."""
        pause_s = PAUSE_S
        num_left = ATTEMPTS
        with _request_errors(self.url, what):
            while True:
                num_left -= 1
                try:
                    return request()
                except Exception as error:
                    if not num_left or type(error).__name__ in LASTING_ERRORS:
                        raise
                time.sleep(pause_s)
                pause_s *= 2


@contextmanager
def _request_errors(url: str, what: str) -> Iterator[None]:
    """Turns any error of a file system into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001 - every file system has errors of its own
        got = type(error).__name__
        reason = " ".join(without_secrets(str(error)).split())
        if reason:
            got += f": {reason[:MAX_REASON_CHARS]}"
        fix = CREDENTIALS_FIX if type(error).__name__ in LASTING_ERRORS else ""
        raise CheckpointError(Fault(KEY, f"{url}: {what}", got=got, fix=fix)) from None


def without_secrets(text: str) -> str:
    """A message of a file system without credentials: values of environment variables that are
    named like secrets, and signatures in URLs.
    """
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARS and SECRET_NAME.search(name):
            text = text.replace(value, HIDDEN)
    return SIGNED_QUERY.sub(rf"\1{HIDDEN}", text)
