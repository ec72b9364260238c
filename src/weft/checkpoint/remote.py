"""Copies of a run's checkpoints at a URL that fsspec writes (s3://, gs://, file://): upload, the newest complete one, download.

URL/ckpt/step-000100/rank-00000.safetensors     as in the run folder
URL/ckpt/step-000100/manifest.json
URL/ckpt/step-000100/manifest.json.sha256       written last: without it, or with another one, the copy does not count
URL/run.toml, plan.json, events.jsonl           after every checkpoint, and at the end of the run
URL/writer.json                                 the process that may write: a later start takes over, and the earlier one stops

Pure: no torch. fsspec is imported late.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weft.checkpoint.disk import replace_file, sync_folder
from weft.checkpoint.folder import FOLDER, checkpoint_path, checkpoints, set_one_aside, steps_of
from weft.checkpoint.format import DIGEST, MANIFEST, Manifest
from weft.checkpoint.manifest import read_manifest, verified_manifest
from weft.checkpoint.remote_files import RemoteFiles
from weft.checkpoint.remote_url import KEY
from weft.errors import CheckpointError, Fault
from weft.small_files import UnreadableFile, read_text

WRITER = "writer.json"
OWN_WRITER = ".remote-writer"
"""File in the run folder: the nonce of this folder's last claim of the URL."""
RUN_FILES = ("run.toml", "plan.json", "events.jsonl")
FETCH_PREFIX = ".fetch-"
"""Folder of a checkpoint while it is downloaded; what is complete in it stays for the next start."""
ASIDE = ".aside"
"""Ending of the checksum file of a copy whose steps are trained again."""
MAX_SMALL_BYTES = 256 * 2**20


@dataclass(frozen=True)
class _StoredManifest:
    """The manifest of a complete copy, its bytes, and those of its checksum file."""

    manifest: Manifest
    text: bytes
    digest: bytes


@dataclass(frozen=True)
class RemoteFolder:
    """The folder of a run at a URL: its copies of checkpoints, their writer and the run's files."""

    files: RemoteFiles

    @staticmethod
    def open(url: str) -> RemoteFolder:
        """Open the file system of a URL.

        Raises:
            CheckpointError: it cannot be opened.
        """
        return RemoteFolder(RemoteFiles.open(url))

    def steps(self) -> list[int]:
        """Steps of all copies, complete or not, newest first."""
        self.files.refresh()
        return steps_of(self.files.names(FOLDER))

    def newest(self) -> int | None:
        """The step of the newest complete copy."""
        for step in self.steps():
            if self.manifest_of(step) is not None:
                return step
        return None

    def manifest_of(self, step: int) -> Manifest | None:
        """The manifest of a complete copy; None of an interrupted or damaged one."""
        stored = self._stored(step)
        if stored is None:
            return None
        return stored.manifest

    def _stored(self, step: int) -> _StoredManifest | None:
        name = _name_of(step)
        sizes = self.files.sizes(FOLDER, name)
        for file in (MANIFEST, DIGEST):
            if file not in sizes or sizes[file] > MAX_SMALL_BYTES:
                return None
        text = self.files.read(FOLDER, name, MANIFEST)
        digest = self.files.read(FOLDER, name, DIGEST)
        if text is None or digest is None:
            return None
        try:
            manifest = verified_manifest(Path(name), text, digest)
        except CheckpointError:
            return None
        if not _are_whole(manifest, sizes):
            return None
        return _StoredManifest(manifest=manifest, text=text, digest=digest)

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
        self.check_writer(nonce)
        is_there = self.files.read(*target, DIGEST) == digest
        if is_there and _are_whole(manifest, self.files.sizes(*target)):
            return
        # The earlier copy of this step no longer counts from here on, while its files are replaced.
        self.files.remove(*target, DIGEST)
        self.files.make_folder(*target)
        for name in manifest.files:
            self.files.put(path / name, *target, name)
        self.files.put(path / MANIFEST, *target, MANIFEST)
        # Once more, as the files took a while: the checksum alone makes the copy count.
        self.check_writer(nonce)
        self.files.write(digest, *target, DIGEST)

    def upload_run_files(self, run_folder: Path) -> None:
        """Copy config, plan and events of the run."""
        for name in RUN_FILES:
            source = run_folder / name
            if source.is_file():
                self.files.put(source, name, is_growing=True)

    def prune(self, keep: int) -> None:
        """Remove copies older than the `keep` newest complete ones; incomplete ones do not count."""
        num_kept = 0
        for step in self.steps():
            if num_kept < keep:
                num_kept += self.manifest_of(step) is not None
                continue
            self.files.remove(FOLDER, _name_of(step), DIGEST)
            self.files.remove_folder(FOLDER, _name_of(step))

    def set_aside(self, *, above: int) -> tuple[int, ...]:
        """Rename the checksums of copies of more than `above` steps, which a resumed run trains
        again; returns the steps.
        """
        renamed: list[int] = []
        for step in self.steps():
            if step <= above:
                break
            name = _name_of(step)
            digest = self.files.read(FOLDER, name, DIGEST)
            if digest is None:
                continue
            # Written before the other one is removed: a death in between loses no checksum.
            self.files.write(digest, FOLDER, name, DIGEST + ASIDE)
            self.files.remove(FOLDER, name, DIGEST)
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
        self.files.make_folder()
        # The last one to write it is the writer: object stores have no locks.
        self.files.write(text.encode(), WRITER)
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
            stored = json.loads(self.files.read(WRITER) or b"{}")
        except ValueError:
            return {}
        if isinstance(stored, dict):
            return stored
        return {}

    def check_writer(self, nonce: str) -> None:
        """Raises CheckpointError if the last writer has another nonce."""
        writer = self._writer()
        if writer.get("nonce") == nonce:
            return
        pid = writer.get("pid")
        host = writer.get("host")
        start = writer.get("started_at")
        fault = Fault(
            KEY,
            f"another run writes to {self.files.url}",
            got=f"process {pid} on {host} since {start}",
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
            self._fetch_run_files(run_folder)
            return newest

    def _fetch_run_files(self, run_folder: Path) -> None:
        """Download config, plan and events of the run, where they are missing."""
        for name in RUN_FILES:
            target = run_folder / name
            if not target.exists() and self.files.read(name) is not None:
                self.files.get(target, name)

    def _set_other_runs_aside(self, run_folder: Path, newest: int) -> None:
        """Another host may have trained on from the URL since this folder was written."""
        is_own = self.is_writer(run_folder)
        copied = self.files.read(FOLDER, _name_of(newest), DIGEST)
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
        stored = self._stored(step)
        if stored is None:
            raise CheckpointError(Fault(KEY, f"the copy {name} has changed during the download"))
        if _digest_of(place) != stored.digest:
            # Begun from another copy of the step: its files have the same names and perhaps lengths.
            shutil.rmtree(place, ignore_errors=True)
        place.mkdir(exist_ok=True)
        # Before the first file: they say which copy the files here are of.
        (place / MANIFEST).write_bytes(stored.text)
        (place / DIGEST).write_bytes(stored.digest)
        for file in stored.manifest.files:
            target = place / file
            if not target.exists():
                self.files.get(target, FOLDER, name, file)
        read_manifest(place)
        sync_folder(place)
        place.rename(folder / name)
        sync_folder(folder)


def _are_whole(manifest: Manifest, sizes: Mapping[str, int]) -> bool:
    """Whether all files of a checkpoint have their lengths."""
    return all(sizes.get(name) == file.num_bytes for name, file in manifest.files.items())


def _digest_of(path: Path) -> bytes:
    """The content of the checksum file of a local checkpoint; b"" if it has none."""
    try:
        return (path / DIGEST).read_bytes()
    except OSError:
        return b""


def _name_of(step: int) -> str:
    return checkpoint_path(Path(), step).name


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
        return f"{self._remote.files.url}/{FOLDER}/{path.name}"

    def upload_run_files(self) -> None:
        """Copy config, plan and events of the run, at its end.

        Raises:
            CheckpointError: it fails again and again, or another writer has taken over.
        """
        self._remote.check_writer(self._nonce)
        self._remote.upload_run_files(self._run_folder)
