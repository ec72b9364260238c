"""Owns the calls that make files last: written whole and flushed, folders flushed; and what a disk that refuses says."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from weft.errors import CheckpointError, Fault

Refused = Literal["the checkpoint is not saved", "the folder is not written"]
NOT_SAVED: Refused = "the checkpoint is not saved"
NOT_WRITTEN: Refused = "the folder is not written"
MENDS: Mapping[Refused, str] = {
    NOT_SAVED: "make room, choose another out, or lower save.keep",
    NOT_WRITTEN: "make room, or choose another folder",
}
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP)
"""Some network file systems flush names by themselves and refuse to be asked."""


def write_whole(path: Path, data: bytes) -> None:
    """A new file that is on the disk when this returns; its name is once the folder is flushed."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put the names in a folder on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_FOLDER_SYNC:
            raise
    finally:
        os.close(handle)


def free_bytes(path: Path) -> int:
    """What is left for us on the disk that holds `path`, or its nearest parent that exists."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free


@contextmanager
def new_folder(folder: Path, *, need_bytes: int) -> Iterator[Path]:
    """Fill the folder that is yielded: at the end it is on the disk and gets the name `folder`, or nothing is left of it.

    Args:
        folder: not there yet, or empty.

    Raises:
        CheckpointError: the disk refuses; about `need_bytes` bytes were to be written.
    """
    beside, free = folder.with_name(f".{folder.name}.{os.getpid()}"), free_bytes(folder)
    try:
        beside.mkdir(parents=True)
        yield beside
        sync_folder(beside)
        if folder.is_dir():
            folder.rmdir()
        beside.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise refusal(error, folder, need_bytes=need_bytes, free=free, what=NOT_WRITTEN) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def refusal(error: OSError, path: Path, *, need_bytes: int, free: int, what: Refused = NOT_SAVED) -> CheckpointError:
    """What to tell of a disk that did not take `need_bytes` bytes; `free` as it was before they were written."""
    where = str(path)
    if error.errno in FULL:
        told = f"{what}: the disk is full ({error.strerror})"
        return CheckpointError(Fault(where, told, f"{free:,} bytes free", f"{need_bytes:,} bytes", MENDS[what]))
    return CheckpointError(
        Fault(where, f"{what}: {error.strerror or error}", need=f"a folder that takes {need_bytes:,} bytes")
    )
