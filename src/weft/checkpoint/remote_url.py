"""URLs of run folders: what counts as one, its local folder, and what is wrong with it. No requests."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from urllib.parse import urlsplit

from weft.errors import Fault
from weft.file_systems import EXTRAS

KEY = "save.remote"
UNWRITABLE = ("http", "https", "data", "github", "git", "gist", "zip", "tar", "libarchive", "hf")
PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]*")
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


def is_url(text: str) -> bool:
    """Whether a folder is named by a URL."""
    return "://" in text


def local_folder(url: str) -> Path:
    """The local run folder of a run whose `out` is a URL, the same for the same URL."""
    url = url.rstrip("/")
    last_part = url.rpartition("/")[2]
    safe_name = UNSAFE.sub("-", last_part).strip("-.")
    name = safe_name[:40] or "run"
    digest = sha256(url.encode()).hexdigest()[:12]
    return Path("runs", "remote", f"{name}-{digest}")


def url_faults(url: str) -> Iterator[Fault]:
    """What is wrong with a URL for checkpoints, without a request."""
    protocol, _, path = url.partition("://")
    if not PROTOCOL.fullmatch(protocol) or not path.strip("/") or not url.isprintable():
        need = "PROTOCOL://PATH, such as s3://bucket/run"
        yield Fault(
            KEY,
            "is no URL of a folder",
            got=repr(url),
            need=need,
            fix="for example s3://bucket/run",
        )
        return
    try:
        has_password = urlsplit(url).password is not None
    except ValueError as error:
        yield Fault(
            KEY, "is no URL of a folder", got=f"{url!r}: {error}", fix="for example s3://bucket/run"
        )
        return
    if has_password:
        fix = "leave it out; file systems read credentials from files and variables of their own"
        yield Fault(KEY, "holds a password, which would be written into run.toml", fix=fix)
    elif "::" in url or protocol in UNWRITABLE:
        yield Fault(
            KEY,
            "cannot be written",
            got=repr(url),
            need="a file system such as s3, gs or file",
            fix="for example s3://bucket/run",
        )
    elif protocol == "memory":
        yield Fault(
            KEY,
            "is lost when the process ends",
            got=repr(url),
            need="a file system that stays",
            fix="for example s3://bucket/run",
        )
    else:
        yield from _import_faults(protocol)


def _import_faults(protocol: str) -> Iterator[Fault]:
    try:
        fsspec = importlib.import_module("fsspec")
    except ImportError:
        fix = 'pip install "weft-train[remote]"'
        yield Fault(KEY, "needs fsspec, which is not installed", fix=fix)
        return
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        known = "one of fsspec, such as s3, gs, abfs or file"
        yield Fault(
            KEY,
            "names an unknown file system",
            got=repr(protocol),
            need=known,
            fix="for example s3://bucket/run",
        )
    except ImportError as error:
        extra = EXTRAS.get(protocol)
        fix = f'pip install "weft-train[{extra}]"' if extra else "install its package"
        yield Fault(KEY, f"cannot open {protocol}://", got=str(error), fix=fix)
