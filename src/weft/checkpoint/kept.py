"""States that no disk took: kept in a folder in memory that outlives the run, and linked into its checkpoint folder.

OUT/ckpt/step-000120 -> /dev/shm/weft-kept-ab12cd34/ckpt/step-000120

The link is a checkpoint like any other: a resume, `generate` and `export` read it. A checkpoint of the
same step that is committed to the disk replaces it, and what is kept is removed. Without room for a
link, the path alone is named.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from weft.checkpoint.disk import free_bytes

KEPT_PREFIX = "weft-kept-"
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it, with rights for the user alone
MAX_SHARE = 0.9
"""Of the free bytes of a folder, which a kept state may take."""


def new_kept_folder(run_folder: Path, *, need_bytes: int) -> Path | None:
    """A private folder in memory, or on another disk than that of the run; None where none has room
    for a state.
    """
    for parent in (MEMORY_FOLDER, Path(tempfile.gettempdir())):
        with suppress(OSError):
            is_same_disk = parent.stat().st_dev == run_folder.stat().st_dev
            if not is_same_disk and need_bytes <= MAX_SHARE * free_bytes(parent):
                return Path(tempfile.mkdtemp(prefix=KEPT_PREFIX, dir=parent))
    return None


def link_kept(final: Path, kept: Path) -> bool:
    """Link a kept checkpoint under its name in the run; whether the disk took the link."""
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        final.symlink_to(kept)
    except OSError:
        return False
    return True


def kept_folder_of(path: Path) -> Path | None:
    """The folder of a kept state that a checkpoint of a run links to; None for any other."""
    try:
        target = Path(os.readlink(path))
    except OSError:
        return None
    folder = target.parent.parent
    return folder if folder.name.startswith(KEPT_PREFIX) else None


def remove_checkpoint(path: Path) -> None:
    """Remove the folder of a checkpoint, or the link to a kept one with what is kept; what cannot
    be removed stays.
    """
    kept = kept_folder_of(path)
    if kept is not None:
        shutil.rmtree(kept, ignore_errors=True)
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)
