"""Lock of a run folder: one writer at a time; a lock whose process has ended is stale. Pure: no torch.

OUT/run.lock holds one JSON object while a run writes into OUT: `LockHolder`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Literal

from weft.checkpoint.disk import NO_LINK_ERRNOS
from weft.errors import Fault, LaunchError
from weft.run.lock_holder import LockHolder

LOCK = "run.lock"
MAX_BYTES = 64 * 1024
HEARTBEAT_S = 15.0
STALE_AFTER_S = 300.0
"""Age of the last heartbeat at which a lock of another machine is stale: 20 heartbeats, and more
than a network file system caches times."""
END_WAIT_S = 3.0
"""How long ranks whose launcher was killed may take to end."""
RETRY_S = 0.02
SETTLE_S = 0.2
"""Without flock: how long another process may take to see that it has removed a lock that was not
stale."""
NO_FLOCK_ERRNOS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EBADF)
OPEN_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

# Note [Two locks in one file]
# The file says who writes; `flock` on it says whether that process, or a rank forked from it, still runs: ranks inherit
# the open file, and the kernel drops the lock with the last of them. Either alone is not enough:
#
#     flock      exact on one machine. NFS since Linux 2.6.12 and Lustre with `-o flock` have it between machines; others
#                reject it, or (NFS with local_lock, Lustre with localflock) know the processes of one machine only
#     contents   pid and start time decide on the machine of the holder (boot id and pid namespace say which that is).
#                For another machine the modification time decides, which rank 0 renews every HEARTBEAT_S
#
# A container has a pid namespace of its own: the pid of a holder in another one cannot be looked up, but one kernel (the same
# boot id) keeps the flocks of all its containers. There flock alone decides: a container that was killed and is started
# again has the folder at once, and while the old one still runs the new one ends with code 75, so that it is started again.
#
# A lock is free only if both agree. The file appears with its contents and its flock: it is written under a private name
# and then linked, and `link` fails if the name exists, on network file systems too (there O_EXCL and a first write are
# two steps). File systems without links get O_EXCL; an empty file is then a lock that is being written. Where two processes
# find the same stale lock, flock admits one of them. Without flock both rename it away and create their own: the slower
# may rename the new lock of the faster, so a new lock counts only if it is still there after SETTLE_S.
# A restart by the agent of torchrun or Slurm may put rank 0 on another machine before the heartbeat is old: a lock of the
# same job on another machine counts as stale, because an agent starts ranks only after it has ended the earlier ones.


@dataclass(frozen=True)
class FolderLock:
    """The lock of a run folder as it was found.

    Attributes:
        holder: None if the file cannot be read as a lock.
        age_s: since the last heartbeat.
        has_flock: whether some process holds the flock; None where the file system has none.
    """

    path: Path
    holder: LockHolder | None
    age_s: float
    has_flock: bool | None

    def state(self, job: str = "") -> Literal["held", "ending", "stale"]:
        """Whether a process writes, has ended but its ranks have not, or has ended; see Note [Two
        locks in one file].

        Args:
            job: the job that asks; its own lock on another machine is stale.
        """
        holder = self.holder
        if holder is None:
            is_old = self.age_s > STALE_AFTER_S
        elif holder.is_on_this_machine():
            is_old = not holder.is_running()
        elif self.is_of_container:
            is_old = True
        else:
            is_same_job = bool(job) and holder.job == job
            is_old = is_same_job or self.age_s > STALE_AFTER_S
        if not is_old:
            return "held"
        return "ending" if self.has_flock else "stale"

    @property
    def is_of_container(self) -> bool:
        """Whether the holder is on this kernel in another pid namespace, where flock alone decides."""
        holder = self.holder
        if holder is None or self.has_flock is None or holder.is_on_this_machine():
            return False
        return holder.is_on_this_kernel()

    def fault(self) -> Fault:
        """The one line for a second writer."""
        holder = self.holder
        if holder is None:
            got = f"{self.path} cannot be read, written {self.age_s:.0f} s ago"
        else:
            got = f"process {holder.pid} on {holder.host} since {holder.started_at}"
            if self.is_of_container:
                got += ", in another container"
            elif not holder.is_on_this_machine():
                got += f", last heartbeat {self.age_s:.0f} s ago"
        return Fault(
            "out",
            f"another run writes into {self.path.parent}",
            got=got,
            need="one writer",
            fix=f"stop that run, or choose another --out; if it has ended: rm {self.path}",
            is_temporary=self.is_of_container,
        )


def find_lock(out: Path) -> FolderLock | None:
    """The lock of a run folder; None if there is none. Changes nothing."""
    path = out / LOCK
    try:
        file = os.open(path, os.O_RDONLY | OPEN_FLAGS)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return None
        raise _unusable(path, error.strerror or str(error)) from error
    try:
        has_own_flock = _flock(file)
        return _inspect(path, file, has_flock=None if has_own_flock is None else not has_own_flock)
    finally:
        os.close(file)


def held_fault(out: Path, *, job: str = "") -> Fault | None:
    """What prevents a second writer; None if the folder is free. Waits for ranks that are ending."""
    deadline = time.monotonic() + END_WAIT_S
    while True:
        try:
            found = find_lock(out)
        except LaunchError as error:
            return error.faults[0]
        if found is None:
            return None
        state = found.state(job)
        if state == "stale":
            return None
        if state == "held" or time.monotonic() > deadline:
            return found.fault()
        time.sleep(RETRY_S)


class HeldLock:
    """The lock of this process on a run folder; released on exit of the `with` block.

    Forked ranks inherit it, and do not release it.
    """

    def __init__(self, path: Path, file: int, holder: LockHolder, *, is_new_folder: bool) -> None:
        self.path = path
        self.holder = holder
        self._file = file
        self._is_new_folder = is_new_folder

    def __enter__(self) -> HeldLock:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        # a rank leaves this block too, in its copy of the memory: the lock is the launcher's
        if os.getpid() != self.holder.pid:
            return
        if _is_same_file(self.path, self._file):
            with suppress(OSError):
                self.path.unlink()
        # after the file is removed: who gets the flock then sees that the path is another file
        os.close(self._file)
        if self._is_new_folder:
            with suppress(OSError):  # a start that failed leaves no empty folder
                self.path.parent.rmdir()


def acquire(out: Path, *, job: str = "") -> HeldLock:
    """Lock a run folder, which is created if it is missing.

    Raises:
        LaunchError: another process writes into it, or the folder cannot be written.
    """
    is_new_folder = not out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
        return _acquire(out / LOCK, LockHolder.this_process(job), is_new_folder=is_new_folder)
    except OSError as error:
        got = f"{str(out)!r}: {error.strerror}"
        fault = Fault("out", "cannot be locked", got=got, fix="choose another --out")
        raise LaunchError(fault) from error


def acquire_new(base: Path, *, job: str = "") -> tuple[Path, HeldLock]:
    """Create and lock a folder that does not exist yet: `base`, else `base-2`, and so on."""
    folder = base
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = base.with_name(f"{base.name}-{number}")
            continue
        except OSError as error:
            got = f"{str(folder)!r}: {error.strerror}"
            fault = Fault("out", "cannot be created", got=got, fix="choose another --out")
            raise LaunchError(fault) from error
        held = _acquire(folder / LOCK, LockHolder.this_process(job), is_new_folder=True)
        return folder, held


def publish_status_board(out: Path, board: Path) -> None:
    """Write the path of the status board into the lock of this process, for `weft status`."""
    try:
        file = os.open(out / LOCK, os.O_RDWR | OPEN_FLAGS)
    except OSError:
        return
    try:
        holder = LockHolder.from_text(_text_of(file))
        if holder is not None and holder.pid == os.getpid() and holder.is_on_this_machine():
            _write(file, replace(holder, status_board=str(board)))
    finally:
        os.close(file)


@contextmanager
def heartbeat(out: Path | None, *, every_s: float = HEARTBEAT_S) -> Iterator[None]:
    """While open, a thread renews the modification time of the lock; rank 0 calls it."""
    if out is None:
        yield
        return
    closing = threading.Event()
    thread = threading.Thread(
        target=_beat, args=(out / LOCK, closing, every_s), name="weft heartbeat", daemon=True
    )
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join()


def _beat(path: Path, closing: threading.Event, every_s: float) -> None:
    while not closing.wait(every_s):
        with suppress(OSError):
            os.utime(path, follow_symlinks=False)


def _acquire(path: Path, mine: LockHolder, *, is_new_folder: bool) -> HeldLock:
    deadline = time.monotonic() + END_WAIT_S
    while True:
        file = _create(path, mine)
        if file is not None:
            # without flock another process may still rename the lock away, and then finds that it was not stale
            if _flock(file) is None:
                time.sleep(SETTLE_S)
            if _is_same_file(path, file):
                return HeldLock(path, file, mine, is_new_folder=is_new_folder)
            os.close(file)
            continue
        file = _open_existing(path)
        if file is None:
            continue  # it was released meanwhile
        is_taken = False
        try:
            has_own_flock = _flock(file)
            # its holder has removed it meanwhile: a flock on a file without a name excludes no one
            if not _is_same_file(path, file):
                continue
            has_flock = None if has_own_flock is None else not has_own_flock
            found = _inspect(path, file, has_flock=has_flock)
            state = found.state(mine.job)
            if state == "held" or (state == "ending" and time.monotonic() > deadline):
                raise LaunchError(found.fault())
            # the flock admits one process: the file is written anew in place, so that its name never vanishes
            if state == "stale" and has_own_flock:
                _write(file, mine)
                is_taken = True
                return HeldLock(path, file, mine, is_new_folder=False)
            if state == "stale":
                _remove_stale(path, found)
        finally:
            if not is_taken:
                os.close(file)
        time.sleep(RETRY_S)


def _create(path: Path, mine: LockHolder) -> int | None:
    """Create the lock file with contents and flock; None if it exists."""
    temporary = path.with_name(f".{path.name}.{mine.nonce}")
    file = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o644)
    is_created = False
    try:
        _flock(file)
        _write(file, mine)
        # fails where the name exists: of several processes one creates the lock
        os.link(temporary, path)
        is_created = True
    except FileExistsError:
        return None
    except OSError as error:
        if error.errno not in NO_LINK_ERRNOS:
            raise
        return _create_without_link(path, mine)
    finally:
        if not is_created:
            os.close(file)
        temporary.unlink()
    return file


def _create_without_link(path: Path, mine: LockHolder) -> int | None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | OPEN_FLAGS, 0o644)
    except FileExistsError:
        return None
    _flock(file)
    _write(file, mine)
    return file


def _open_existing(path: Path) -> int | None:
    try:
        return os.open(path, os.O_RDWR | OPEN_FLAGS)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(path, error.strerror or str(error)) from error


def _inspect(path: Path, file: int, *, has_flock: bool | None) -> FolderLock:
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        raise _unusable(path, "not a regular file")
    holder = LockHolder.from_text(_text_of(file))
    age_s = max(0.0, time.time() - status.st_mtime)
    return FolderLock(path, holder, age_s, has_flock)


def _remove_stale(path: Path, found: FolderLock) -> None:
    """Remove a stale lock without flock: of several processes that found it, one succeeds."""
    aside = path.with_name(f".{path.name}.stale.{secrets.token_hex(8)}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    file = os.open(aside, os.O_RDONLY | OPEN_FLAGS)
    try:
        moved = LockHolder.from_text(_text_of(file))
    finally:
        os.close(file)
    if moved != found.holder:  # another process has locked the folder meanwhile
        with suppress(OSError):
            os.link(aside, path)
    aside.unlink()


def _unusable(path: Path, reason: str) -> LaunchError:
    fault = Fault("out", "has an unusable lock file", got=f"{path}: {reason}", fix=f"rm {path}")
    return LaunchError(fault)


def _flock(file: int) -> bool | None:
    """Take the flock of an open file; False if another process holds it, None if there is none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_FLOCK_ERRNOS:
            return None
        raise
    return True


def _is_same_file(path: Path, file: int) -> bool:
    """Whether `path` still names the open file."""
    try:
        return os.path.samestat(os.lstat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _text_of(file: int) -> str:
    return os.pread(file, MAX_BYTES, 0).decode("utf-8", errors="replace")


def _write(file: int, holder: LockHolder) -> None:
    """Replace the contents in one call; what is shorter than before is filled with spaces."""
    text = json.dumps(asdict(holder), indent=1) + "\n"
    old_size = os.fstat(file).st_size
    # not truncated first: a reader in between would see an empty lock
    data = text.encode().ljust(old_size)
    os.pwrite(file, data, 0)
