"""A private folder in the memory of a node for the ranks that torchrun or Slurm starts there, which outlives them.

Under torchrun the first rank of the node makes it, and it ends with the agent. Under Slurm a process
of its own does (`weft.run.node_keeper`), and it ends with the job. Imports no torch.
"""

from __future__ import annotations

import os
import select
import shutil
import time
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

from weft.errors import EXIT_FAILED, EXIT_OK
from weft.run.private_folder import MEMORY_FOLDER, PREFIX, become_cleaner, is_closed_folder

AGENT_VARIABLE = "TORCHELASTIC_RUN_ID"
KEEPER_VARIABLE = "WEFT_NODE_KEEPER"
"""Name of the job whose nodes have keepers; set by the job file of Slurm."""
KEEPER_WAIT_S = 30.0
"""How long the first rank of a node waits for the folder of its keeper."""


def node_name() -> str:
    """Name of this node, which no other node of a job has."""
    return os.uname().nodename


def has_agent(env: Mapping[str, str]) -> bool:
    """Whether torchrun has started this process."""
    return AGENT_VARIABLE in env


def has_keeper(env: Mapping[str, str]) -> bool:
    """Whether a process of its own keeps a folder on this node for the job of this rank."""
    return bool(env.get(KEEPER_VARIABLE))


def has_node_folder(env: Mapping[str, str]) -> bool:
    """Whether something on this node outlives the ranks, and so may hold a folder for them."""
    return has_agent(env) or has_keeper(env)


def open_node_folder(env: Mapping[str, str], out: Path) -> Path | None:
    """The folder of the run `out` for the ranks of this node; None without memory that holds files,
    without an agent or a keeper, or if the folder is not safe.
    """
    if not os.access(MEMORY_FOLDER, os.W_OK):
        return None
    if has_agent(env):
        return _folder_of_agent(env[AGENT_VARIABLE], out)
    if has_keeper(env):
        return _folder_of_keeper(env[KEEPER_VARIABLE], out)
    return None


def remove_node_folder(folder: Path | None) -> None:
    """Remove the folder, if there is one, at the end of a run; all ranks of the node may."""
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def folder_path(*identity: str) -> Path:
    """The folder on this node of what `identity` names; equal for all its processes."""
    text = "\0".join((node_name(), *identity))
    digest = sha256(text.encode()).hexdigest()
    return MEMORY_FOLDER / f"{PREFIX}{digest[:24]}"


def is_own_folder(folder: Path) -> bool:
    """Whether it is a folder of this user that others cannot read."""
    try:
        status = os.lstat(folder)
    except OSError:
        return False
    return is_closed_folder(status, owner=os.geteuid())


def _folder_of_agent(run_id: str, out: Path) -> Path | None:
    """Made by the first rank of torchrun's agent, removed when the agent has ended."""
    agent = os.getppid()
    folder = folder_path(run_id, str(agent), str(out.resolve()))
    try:
        # opened before the folder is made: a number could be another process when the cleaner waits for it
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
    return folder if is_own_folder(folder) else None


def _folder_of_keeper(job: str, out: Path) -> Path | None:
    """A folder in that of the keeper, which may start at the same time as this rank."""
    kept = folder_path(job)
    deadline_s = time.monotonic() + KEEPER_WAIT_S
    while not is_own_folder(kept):
        if time.monotonic() > deadline_s:
            return None
        time.sleep(0.1)
    name_of_run = sha256(str(out.resolve()).encode()).hexdigest()
    folder = kept / name_of_run[:24]
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return None
    return folder


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
