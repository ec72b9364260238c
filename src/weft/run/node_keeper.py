"""Keeper of a node's folder in memory: a process on every node of a Slurm job, which holds the folder while ranks start again.

    job step 0   srun ... python -m weft.run.node_keeper    one a node, as long as the job
    job step 1   srun ... weft train                        ranks; one of them fails
    job step 2   srun ... weft train                        finds the snapshots of step 1

It removes the folder when Slurm ends the job (SIGTERM). A keeper that was killed leaves its folder,
which the next keeper on the node removes. Imports no torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER
from weft.run.node_folder import KEEPER_VARIABLE, folder_path, has_keeper, is_own_folder
from weft.run.private_folder import MEMORY_FOLDER, PREFIX

LOCK = "keeper.lock"
"""Locked by the keeper of a folder, as long as it lives."""
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def main(env: Mapping[str, str] = os.environ) -> int:
    """Make the folder, hold it until a signal ends the job, and remove it; see `prepare_signals`."""
    if not has_keeper(env):
        sys.stderr.write(f"error: {KEEPER_VARIABLE} names no job; Slurm's job file sets it\n")
        return EXIT_USER
    remove_folders_without_keeper()
    folder = folder_path(env[KEEPER_VARIABLE])
    try:
        lock = make_kept_folder(folder)
    except OSError as error:
        text = f"no snapshots in memory on this node: {folder}: {error.strerror}"
        sys.stderr.write(f"warning: {text}\n")
        return EXIT_FAILED
    signal.sigwait(ENDING_SIGNALS)
    shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)
    return EXIT_OK


def prepare_signals() -> None:
    """Keep signals that end the job for `main`, and ignore the one that asks the ranks to save."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)


def make_kept_folder(folder: Path) -> int:
    """Make the folder of a keeper, and lock it; the file descriptor of the lock.

    It has its lock when it gets its name, so that no other keeper removes it before.
    """
    unnamed = folder.with_name(f"{folder.name}-{os.getpid()}")
    unnamed.mkdir(mode=0o700)
    lock = os.open(unnamed / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        # fails where another keeper has the name with its content, which is then in use
        unnamed.rename(folder)
    except OSError:
        shutil.rmtree(unnamed, ignore_errors=True)
        os.close(lock)
        raise
    return lock


def remove_folders_without_keeper() -> None:
    """Remove what killed keepers of this user have left on this node."""
    for folder in MEMORY_FOLDER.glob(f"{PREFIX}*"):
        if is_own_folder(folder) and _has_lost_its_keeper(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _has_lost_its_keeper(folder: Path) -> bool:
    """Whether a keeper made the folder, and has ended."""
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        with suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False
    finally:
        os.close(lock)


if __name__ == "__main__":
    prepare_signals()
    sys.exit(main())
