"""A private folder in the memory of a node for the ranks that torchrun starts there: it outlives them and ends with the agent.

Imports no torch.
"""

from __future__ import annotations

import os
import select
import shutil
import stat
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from weft.errors import EXIT_FAILED, EXIT_OK
from weft.run.private_folder import MEMORY_FOLDER, PREFIX, become_cleaner

AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"


def node_name() -> str:
    """Name of this node, which no other node of a job has."""
    return os.uname().nodename


def has_agent(env: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process."""
    return AGENT_VARIABLE in env


def open_node_folder(env: Mapping[str, str], out: Path) -> Path | None:
    """The folder of the run `out` for the ranks of this node's agent, created by the first of them;
    None without memory that holds files, or if the folder is not safe.
    """
    agent = os.getppid()
    if not os.access(MEMORY_FOLDER, os.W_OK):
        return None
    identity = "\0".join((node_name(), env[AGENT_VARIABLE], str(agent), str(out.resolve())))
    digest = sha256(identity.encode()).hexdigest()
    folder = MEMORY_FOLDER / f"{PREFIX}{digest[:24]}"
    try:
        agent_file = os.pidfd_open(agent)
    except OSError:
        return None
    try:
        folder.mkdir(mode=0o700)
        _fork_cleaner(agent_file, folder)
    except FileExistsError:
        pass
    except OSError:
        return None
    finally:
        os.close(agent_file)
    return folder if _is_own(folder) else None


def remove_node_folder(folder: Path | None) -> None:
    """Remove the folder, if there is one, at the end of a run; all ranks of the node may."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def _is_own(folder: Path) -> bool:
    """Whether it is a folder of this user that others cannot read."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    is_closed = stat.S_IMODE(status.st_mode) & 0o077 == 0
    return stat.S_ISDIR(status.st_mode) and is_closed and status.st_uid == os.geteuid()


def _fork_cleaner(agent_file: int, folder: Path) -> None:
    """Fork a process that removes the folder once the agent has ended, however it ends."""
    if os.fork():
        return
    code = EXIT_FAILED
    try:
        become_cleaner(agent_file)
        select.select([0], [], [])  # readable once the agent has ended
        shutil.rmtree(folder, ignore_errors=True)
        code = EXIT_OK
    finally:
        os._exit(code)
