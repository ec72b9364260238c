"""A private temporary folder of a launcher, removed when the launcher and its ranks have ended, however they end."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import stat
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from weft.errors import Fault, LaunchError

PREFIX = "weft-"
MEMORY_FOLDER = Path("/dev/shm")  # noqa: S108 - a folder of its own is made in it, with rights for the user alone
PR_SET_NAME = 15
CLEANER_NAME = b"weft-cleaner"

# Note [The cleaner process]
# SIGKILL gives a launcher no chance to remove anything. So a small process is started first, which reads a pipe that the
# launcher and all ranks (forked later) hold open, and never write. The read returns once the last of them has ended; then
# the process removes the folders. It has its own session, blocks the signals that end a job, and holds no other file.
# It is a new interpreter without any module but `os` (8 ms of computing): to fork a process that has imported torch takes
# 22 ms, and every page that the launcher writes afterwards is copied.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGQUIT)
CLEANER = """
import os, sys
os.closerange(1, os.sysconf("SC_OPEN_MAX"))
os.chdir("/")
try:
    with open("/proc/self/comm", "w") as file:
        file.write("weft-cleaner")
except OSError:
    pass
os.read(0, 1)
for folder in sys.argv[1:]:
    if os.path.lexists(folder):
        import shutil
        shutil.rmtree(folder, ignore_errors=True)
"""


def is_private_file(path: Path, *, owner: int) -> bool:
    """Whether a file lies directly in the private folder of a launcher of this user.

    Args:
        owner: user id.
    """
    try:
        folder = os.lstat(path.parent)
        file = os.lstat(path)
    except (OSError, ValueError):
        return False
    if not path.parent.name.startswith(PREFIX) or not is_closed_folder(folder, owner=owner):
        return False
    has_other_names = file.st_nlink > 1
    return stat.S_ISREG(file.st_mode) and not has_other_names and file.st_uid == owner


def is_closed_folder(status: os.stat_result, *, owner: int) -> bool:
    """Whether this is the status of a folder of a user that others cannot read."""
    rights_of_others = stat.S_IMODE(status.st_mode) & 0o077
    return stat.S_ISDIR(status.st_mode) and not rights_of_others and status.st_uid == owner


class PrivateFolder:
    """A new folder that only this user can read, while open.

    Attributes:
        path: the folder.
        memory_path: a second one of the same name in memory (tmpfs), or None.
    """

    def __init__(self, *, in_memory: bool = False) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self.memory_path: Path | None = None
        folders = [self.path]
        if in_memory and os.access(MEMORY_FOLDER, os.W_OK):
            self.memory_path = MEMORY_FOLDER / self.path.name
            self.memory_path.mkdir(mode=0o700)
            folders.append(self.memory_path)
        self._owner = os.getpid()
        self._folders = tuple(folders)
        # at once: whatever ends this process from here on, the folders go
        self._cleaner, self._held = _start_cleaner(self._folders)

    def renew(self) -> bool:
        """Make the folders again that something has removed during the run, such as a cleaner of
        temporary files; whether `path` was.

        Raises:
            LaunchError: a folder cannot be made, or its name is another user's now.
        """
        was_removed = not self.path.exists()
        for folder in self._folders:
            try:
                folder.mkdir(mode=0o700, parents=True)
            except FileExistsError:
                if not is_closed_folder(os.lstat(folder), owner=os.getuid()):
                    fault = Fault("TMPDIR", "the private folder is another one now", str(folder))
                    raise LaunchError(fault) from None
            except OSError as error:
                got = f"{folder}: {error.strerror}"
                raise LaunchError(Fault("TMPDIR", "cannot be written", got)) from error
        return was_removed

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the folders; only the process that has created them does. All ranks have ended."""
        if os.getpid() != self._owner:
            return
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)
        # after the removal: the cleaner then finds nothing, and ends without an import
        os.close(self._held)
        os.waitpid(self._cleaner, 0)


def _start_cleaner(folders: tuple[Path, ...]) -> tuple[int, int]:
    """Process id of the cleaner, and the end of the pipe that keeps it waiting; see Note [The cleaner
    process].
    """
    reading, held = os.pipe()
    pid = os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", "-c", CLEANER, *map(str, folders)],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
        setsid=True,
        setsigmask=ENDING_SIGNALS,
    )
    os.close(reading)
    return pid, held


def become_cleaner(awaited: int) -> None:
    """Detach this fork from its parent's session, signals and files, but for the one that it waits
    for, which becomes descriptor 0.
    """
    os.setsid()
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_NAME, CLEANER_NAME, 0, 0, 0)
    os.dup2(awaited, 0)
    # an inherited end of a pipe, kept open here, would let those that read the other wait for ever
    os.closerange(1, os.sysconf("SC_OPEN_MAX"))
    os.chdir("/")
