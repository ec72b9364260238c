"""Durable file writes: write and flush files and folders, create a folder atomically, and describe disk errors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from weft.errors import CheckpointError, Fault

Failure = Literal["the checkpoint is not saved", "the folder is not written"]
NOT_SAVED: Failure = "the checkpoint is not saved"
NOT_WRITTEN: Failure = "the folder is not written"
FIX_OF_FULL_DISK: Mapping[Failure, str] = {
    NOT_SAVED: "free disk space, choose another out, or lower save.keep",
    NOT_WRITTEN: "free disk space, or choose another folder",
}
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_LINK_ERRNOS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EACCES)
"""Errors of file systems without hard links."""
NO_FOLDER_SYNC_ERRNOS = (errno.EINVAL, errno.ENOTSUP)
"""Some network file systems flush names by themselves and reject fsync on a folder."""


def write_whole(path: Path, data: bytes) -> None:
    """Write a new file and flush it to the disk; its name is durable once the folder is flushed."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def replace_file(path: Path, content: str | bytes, *, kept: Path | None = None) -> None:
    """Write a file whole: to a private temporary file, flushed to the disk, then renamed.

    A symbolic link at `path` is replaced, not followed; one at the temporary name is an error.

    Args:
        kept: name that an existing file at `path` gets before: at every moment there is a whole
            file at `path`, and the old one at one of the two names.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(temporary, flags, 0o666), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        if kept is not None:
            _add_name(path, kept)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _add_name(path: Path, name: Path) -> None:
    """Give a file a second name; where the file system has no links, or for a folder, another one."""
    try:
        os.link(path, name, follow_symlinks=False)
    except OSError as error:
        if error.errno not in NO_LINK_ERRNOS:
            raise
        path.rename(name)


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC_ERRNOS:
            raise
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int:
    """Bytes available on the disk that holds `path`, or its nearest existing parent; 0: the disk does
    not answer, and takes nothing.
    """
    try:
        while not path.exists():
            path = path.parent
        return shutil.disk_usage(path).free
    except OSError:
        return 0


@contextmanager
def new_folder(folder: Path, *, need_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder to fill; at the end it is flushed and renamed to `folder`, or
    removed on an error.

    Args:
        folder: does not exist yet, or is empty.
        need_bytes: about how many bytes will be written, for the error message.

    Raises:
        CheckpointError: a disk error occurs.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    free = free_bytes(folder)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        sync_folder(temporary)
        if folder.is_dir():
            folder.rmdir()
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise disk_error(
            error, folder, need_bytes=need_bytes, free=free, failure=NOT_WRITTEN
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def disk_error(
    error: OSError, path: Path, *, need_bytes: int, free: int, failure: Failure = NOT_SAVED
) -> CheckpointError:
    """The error for a disk that did not take `need_bytes` bytes; `free` as it was before they were
    written.
    """
    if error.errno in DISK_FULL_ERRNOS:
        fault = Fault(
            str(path),
            f"{failure}: the disk is full ({error.strerror})",
            got=f"{free:,} bytes free",
            need=f"{need_bytes:,} bytes",
            fix=FIX_OF_FULL_DISK[failure],
        )
    else:
        reason = error.strerror or str(error)
        fault = Fault(
            str(path), f"{failure}: {reason}", need=f"a folder that takes {need_bytes:,} bytes"
        )
    return CheckpointError(fault)
