"""Owns the calls that make files last: written whole and flushed, folders flushed; and what a disk that refuses says."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from weft.errors import CheckpointError, Fault

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


def refusal(error: OSError, path: Path, *, need_bytes: int, free: int) -> CheckpointError:
    """What to tell of a disk that did not take `need_bytes` bytes; `free` as it was before they were written."""
    where = str(path)
    if error.errno in FULL:
        fix = "make room, choose another out, or lower save.keep"
        what = f"the checkpoint is not saved: the disk is full ({error.strerror})"
        return CheckpointError(Fault(where, what, f"{free:,} bytes free", f"{need_bytes:,} bytes", fix))
    what = f"the checkpoint is not saved: {error.strerror or error}"
    return CheckpointError(Fault(where, what, need=f"a folder that takes {need_bytes:,} bytes"))
