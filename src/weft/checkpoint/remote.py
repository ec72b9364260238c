"""Copies of a run's checkpoints at a URL that fsspec writes (s3://, gs://, file://): upload, the newest complete one, download.

URL/ckpt/step-000100/rank-00000.safetensors     as in the run folder
URL/ckpt/step-000100/manifest.json
URL/ckpt/step-000100/manifest.json.sha256       written last: without it, or with another one, the copy does not count
URL/run.toml, plan.json, events.jsonl           after every checkpoint
URL/writer.json                                 the process that may write: a later start takes over, and the earlier one stops

Pure: no torch. fsspec is imported late.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from weft.checkpoint.disk import replace_file, sync_folder
from weft.checkpoint.folder import FOLDER, checkpoint_path, checkpoints, set_one_aside, steps_of
from weft.checkpoint.format import DIGEST, MANIFEST, Manifest
from weft.checkpoint.manifest import read_manifest, verified_manifest
from weft.errors import CheckpointError, Fault
from weft.small_files import UnreadableFile, read_text

KEY = "save.remote"
WRITER = "writer.json"
OWN_WRITER = ".remote-writer"
"""File in the run folder: the nonce of this folder's last claim of the URL."""
RUN_FILES = ("run.toml", "plan.json", "events.jsonl")
FETCH_PREFIX = ".fetch-"
"""Folder of a checkpoint while it is downloaded; what is complete in it stays for the next start."""
PART = ".part"
ASIDE = ".aside"
"""Ending of the checksum file of a copy whose steps are trained again."""
ATTEMPTS = 3
PAUSE_S = 1.0
"""Before the second attempt of a request; twice as long before each further one."""
MAX_SMALL_BYTES = 256 * 2**20
UNWRITABLE = ("http", "https", "data", "github", "git", "gist", "zip", "tar", "libarchive", "hf")
PROTOCOL = re.compile(r"[a-z][a-z0-9+.-]*")
UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")

T = TypeVar("T")


def is_url(text: str) -> bool:
    """Whether a folder is named by a URL."""
    return "://" in text


def local_folder(url: str) -> Path:
    """The local run folder of a run whose `out` is a URL, the same for the same URL."""
    url = url.rstrip("/")
    last_part = url.rpartition("/")[2]
    name = UNSAFE.sub("-", last_part).strip("-.")
    digest = sha256(url.encode()).hexdigest()
    return Path("runs", "remote", f"{name[:40] or 'run'}-{digest[:12]}")


def url_faults(url: str) -> Iterator[Fault]:
    """What is wrong with a URL for checkpoints, without a request."""
    protocol, _, path = url.partition("://")
    if not PROTOCOL.fullmatch(protocol) or not path.strip("/") or not url.isprintable():
        need = "PROTOCOL://PATH, such as s3://bucket/run"
        yield Fault(KEY, "is no URL of a folder", repr(url), need)
        return
    try:
        has_password = urlsplit(url).password is not None
    except ValueError as error:
        yield Fault(KEY, "is no URL of a folder", f"{url!r}: {error}")
        return
    if has_password:
        fix = "leave it out; file systems read credentials from files and variables of their own"
        yield Fault(KEY, "holds a password, which would be written into run.toml", fix=fix)
    elif "::" in url or protocol in UNWRITABLE:
        yield Fault(KEY, "cannot be written", repr(url), "a file system such as s3, gs or file")
    elif protocol == "memory":
        yield Fault(KEY, "is lost when the process ends", repr(url), "a file system that stays")
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
        yield Fault(KEY, "names an unknown file system", repr(protocol), known)
    except ImportError as error:
        yield Fault(KEY, f"cannot open {protocol}://: {error}")


@dataclass(frozen=True)
class _StoredManifest:
    """The manifest of a complete copy, its bytes, and those of its checksum file."""

    manifest: Manifest
    text: bytes
    digest: bytes


@dataclass(frozen=True)
class RemoteFolder:
    """The folder of a run at a URL.

    Attributes:
        fs: the fsspec file system.
        root: the folder within it.
    """

    url: str
    fs: Any
    root: str

    @staticmethod
    def open(url: str) -> RemoteFolder:
        """Open the file system of a URL.

        Raises:
            CheckpointError: it cannot be opened.
        """
        faults = tuple(url_faults(url))
        if faults:
            raise CheckpointError(*faults)
        core = importlib.import_module("fsspec.core")
        with _request_errors(url, "cannot be opened"):
            fs, root = core.url_to_fs(url, skip_instance_cache=True)
        return RemoteFolder(url.rstrip("/"), fs, root.rstrip("/"))

    def path(self, *names: str) -> str:
        """A path within the file system."""
        return "/".join((self.root, *names))

    def steps(self) -> list[int]:
        """Steps of all copies, complete or not, newest first."""
        self.fs.invalidate_cache()
        return steps_of(self._names(FOLDER))

    def newest(self) -> int | None:
        """The step of the newest complete copy."""
        for step in self.steps():
            if self.manifest_of(step) is not None:
                return step
        return None

    def manifest_of(self, step: int) -> Manifest | None:
        """The manifest of a complete copy; None of an interrupted or damaged one."""
        stored = self._stored(step)
        return None if stored is None else stored.manifest

    def _stored(self, step: int) -> _StoredManifest | None:
        name = _name_of(step)
        sizes = self._sizes(FOLDER, name)
        is_small = all(
            sizes.get(file, MAX_SMALL_BYTES + 1) <= MAX_SMALL_BYTES for file in (MANIFEST, DIGEST)
        )
        if not is_small:
            return None
        text, digest = self._read(FOLDER, name, MANIFEST), self._read(FOLDER, name, DIGEST)
        if text is None or digest is None:
            return None
        try:
            manifest = verified_manifest(Path(name), text, digest)
        except CheckpointError:
            return None
        are_whole = all(sizes.get(file) == of.num_bytes for file, of in manifest.files.items())
        return _StoredManifest(manifest, text, digest) if are_whole else None

    def upload(self, path: Path, *, nonce: str) -> None:
        """Copy a complete checkpoint; its checksum is written last, and an earlier copy of the step
        counts no longer from the start.

        Args:
            nonce: of this writer.

        Raises:
            CheckpointError: a request fails again and again, or another writer has taken over.
        """
        manifest = read_manifest(path)
        digest = (path / DIGEST).read_bytes()
        target = (FOLDER, path.name)
        self._check_writer(nonce)
        is_there = self._read(*target, DIGEST) == digest
        if is_there and self._is_whole(path.name, manifest):
            return
        self._remove(*target, DIGEST)
        self._make_folder(*target)
        for name in manifest.files:
            self._put(path / name, *target, name)
        self._put(path / MANIFEST, *target, MANIFEST)
        self._check_writer(nonce)
        self._write(digest, *target, DIGEST)

    def _is_whole(self, folder: str, manifest: Manifest) -> bool:
        sizes = self._sizes(FOLDER, folder)
        return all(sizes.get(name) == file.num_bytes for name, file in manifest.files.items())

    def upload_run_files(self, run_folder: Path) -> None:
        """Copy config, plan and events of the run."""
        for name in RUN_FILES:
            if (run_folder / name).is_file():
                self._put(run_folder / name, name, is_growing=True)

    def prune(self, keep: int) -> None:
        """Remove copies older than the `keep` newest complete ones; incomplete ones do not count."""
        num_kept = 0
        for step in self.steps():
            if num_kept < keep:
                num_kept += self.manifest_of(step) is not None
                continue
            self._remove(FOLDER, _name_of(step), DIGEST)
            remove = partial(self.fs.rm, self.path(FOLDER, _name_of(step)), recursive=True)
            self._try("cannot be removed", remove)

    def set_aside(self, *, above: int) -> tuple[int, ...]:
        """Rename the checksums of copies of more than `above` steps, which a resumed run trains
        again; returns the steps.
        """
        renamed: list[int] = []
        for step in self.steps():
            if step <= above:
                break
            name = _name_of(step)
            digest = self._read(FOLDER, name, DIGEST)
            if digest is None:
                continue
            self._write(digest, FOLDER, name, DIGEST + ASIDE)
            self._remove(FOLDER, name, DIGEST)
            renamed.append(step)
        return tuple(renamed)

    def claim(self, run_folder: Path) -> str:
        """Become the writer; the nonce for `upload`. An earlier writer fails at its next upload."""
        nonce = secrets.token_hex(16)
        now = datetime.now(UTC)
        writer = {
            "nonce": nonce,
            "host": os.uname().nodename,
            "pid": os.getpid(),
            "started_at": now.isoformat(timespec="seconds"),
        }
        text = json.dumps(writer)
        self._make_folder()
        self._write(text.encode(), WRITER)
        replace_file(run_folder / OWN_WRITER, nonce)
        return nonce

    def is_writer(self, run_folder: Path) -> bool:
        """Whether the run folder is that of the last writer."""
        try:
            own = read_text(run_folder / OWN_WRITER, max_bytes=4096)
        except UnreadableFile:
            return False
        return self._writer().get("nonce") == own

    def _writer(self) -> dict[str, Any]:
        try:
            stored = json.loads(self._read(WRITER) or b"{}")
        except ValueError:
            return {}
        return stored if isinstance(stored, dict) else {}

    def _check_writer(self, nonce: str) -> None:
        writer = self._writer()
        if writer.get("nonce") == nonce:
            return
        pid, host = writer.get("pid"), writer.get("host")
        fault = Fault(
            KEY,
            f"another run writes to {self.url}",
            got=f"process {pid} on {host} since {writer.get('started_at')}",
            need="one writer",
            fix="another out",
        )
        raise CheckpointError(fault)

    def fetch(self, run_folder: Path) -> int | None:
        """Download the newest complete copy, if the run folder has no newer checkpoint of its own;
        the step of the copy, None if there is none.

        Local checkpoints that are not of the run at the URL are renamed to `aside-...`.

        Raises:
            CheckpointError: a request fails again and again, or the disk takes no file.
        """
        folder = run_folder / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{FETCH_PREFIX}lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one process of the host downloads
            newest = self.newest()
            if newest is None:
                return None
            self._set_other_runs_aside(run_folder, newest)
            if not checkpoint_path(run_folder, newest).exists():
                self._download(newest, folder)
            for name in RUN_FILES:
                if not (run_folder / name).exists() and self._read(name) is not None:
                    self._get(run_folder / name, name)
            return newest

    def _set_other_runs_aside(self, run_folder: Path, newest: int) -> None:
        """Another host may have trained on from the URL since this folder was written."""
        is_own = self.is_writer(run_folder)
        copied = self._read(FOLDER, _name_of(newest), DIGEST)
        local = list(checkpoints(run_folder))
        for step, path in local:
            is_overtaken = step > newest and not is_own
            is_another = step == newest and _digest_of(path) != copied
            if is_overtaken or is_another:
                set_one_aside(path)

    def _download(self, step: int, folder: Path) -> None:
        """Download a copy into its temporary folder, without the files that are there already, and
        rename it.
        """
        name = _name_of(step)
        place = folder / f"{FETCH_PREFIX}{name}"
        for other in folder.glob(f"{FETCH_PREFIX}step-*"):
            if other != place:
                shutil.rmtree(other, ignore_errors=True)
        place.mkdir(exist_ok=True)
        stored = self._stored(step)
        if stored is None:
            raise CheckpointError(Fault(KEY, f"the copy {name} has changed during the download"))
        (place / MANIFEST).write_bytes(stored.text)
        (place / DIGEST).write_bytes(stored.digest)
        for file in stored.manifest.files:
            if not (place / file).exists():
                self._get(place / file, FOLDER, name, file)
        read_manifest(place)
        sync_folder(place)
        place.rename(folder / name)
        sync_folder(folder)

    def _names(self, *parts: str) -> list[str]:
        return sorted(self._sizes(*parts))

    def _sizes(self, *parts: str) -> dict[str, int]:
        """Name -> bytes of the entries of a folder, in which a folder has 0."""

        def list_entries() -> list[dict[str, Any]]:
            try:
                return list(self.fs.ls(self.path(*parts), detail=True))
            except FileNotFoundError:
                return []

        sizes: dict[str, int] = {}
        for entry in self._try("cannot be listed", list_entries):
            name = entry["name"].rstrip("/").rpartition("/")[2]
            sizes[name] = entry.get("size") or 0
        return sizes

    def _read(self, *parts: str) -> bytes | None:
        """The content of a small file; None if there is none."""

        def read() -> bytes | None:
            try:
                content: bytes = self.fs.cat_file(self.path(*parts))
            except FileNotFoundError:
                return None
            return content

        return self._try("cannot be read", read)

    def _write(self, content: bytes, *parts: str) -> None:
        self._try("cannot be written", lambda: self.fs.pipe_file(self.path(*parts), content))
        self.fs.invalidate_cache()

    def _make_folder(self, *parts: str) -> None:
        """Make a folder; object stores need none."""
        self._try("cannot be made", lambda: self.fs.makedirs(self.path(*parts), exist_ok=True))

    def _remove(self, *parts: str) -> None:
        def remove() -> None:
            with suppress(FileNotFoundError):
                self.fs.rm_file(self.path(*parts))

        self._try("cannot be removed", remove)
        self.fs.invalidate_cache()

    def _put(self, source: Path, *parts: str, is_growing: bool = False) -> None:
        """Upload a file, and check its length."""
        target = self.path(*parts)

        def put() -> None:
            self.fs.put_file(str(source), target)
            if is_growing:
                return
            self.fs.invalidate_cache()
            num_bytes = source.stat().st_size
            num_arrived = self.fs.info(target)["size"]
            if num_arrived != num_bytes:
                raise OSError(f"{num_arrived} of {num_bytes} bytes have arrived")

        self._try("cannot be uploaded", put)

    def _get(self, target: Path, *parts: str) -> None:
        """Download a file whole: to another name, then renamed."""
        part = target.with_name(target.name + PART)

        def get() -> None:
            self.fs.get_file(self.path(*parts), str(part))
            part.replace(target)

        self._try("cannot be downloaded", get)

    def _try(self, what: str, request: Callable[[], T]) -> T:
        """The result of a request, which is repeated if it fails.

        Raises:
            CheckpointError: it fails again and again.
        """
        for attempt in range(1, ATTEMPTS):
            try:
                return request()
            except Exception:  # noqa: BLE001 - every file system has errors of its own
                time.sleep(PAUSE_S * 2 ** (attempt - 1))
        with _request_errors(self.url, what):
            return request()


def _digest_of(path: Path) -> bytes:
    """The content of the checksum file of a local checkpoint; b"" if it has none."""
    try:
        return (path / DIGEST).read_bytes()
    except OSError:
        return b""


def _name_of(step: int) -> str:
    return checkpoint_path(Path(), step).name


@contextmanager
def _request_errors(url: str, what: str) -> Iterator[None]:
    """Turns any error of a file system into one line."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        name = type(error).__name__
        reason = " ".join(str(error).split())[:300]
        got = f"{name}: {reason}" if reason else name
        raise CheckpointError(Fault(KEY, f"{url}: {what}", got)) from error


class RemoteCopies:
    """The copies that a run writes: uploads after each save, on the rank that commits.

    Args:
        num_done: steps that are done: copies of later ones are set aside.

    Raises:
        CheckpointError: the URL cannot be written.
    """

    def __init__(self, url: str, run_folder: Path, *, keep: int, num_done: int) -> None:
        self._remote = RemoteFolder.open(url)
        self._run_folder = run_folder
        self._keep = keep
        self._nonce = self._remote.claim(run_folder)
        self._remote.set_aside(above=num_done)

    def upload(self, path: Path) -> str:
        """Copy a checkpoint and the files of the run, and remove old copies; the URL of the copy.

        Raises:
            CheckpointError: it fails again and again, or another writer has taken over.
        """
        self._remote.upload(path, nonce=self._nonce)
        self._remote.upload_run_files(self._run_folder)
        self._remote.prune(self._keep)
        return f"{self._remote.url}/{FOLDER}/{path.name}"
