"""Ranks that an agent (torchrun, Slurm) has started: they end with it, and resume after it has started them again.

Imports no torch.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from weft.errors import Fault, LaunchError

Env = Mapping[str, str]

PR_SET_PDEATHSIG = 1
AGENT_VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK")
"""torchrun sets both; only the second is set by hand."""
RESTART_VARIABLES = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")

# Note [Ranks without an agent]
# torchrun that is killed (SIGKILL, SIGUSR1) leaves its ranks running. The kernel ends a process when the thread that
# started it ends, if the process has asked for it (PR_SET_PDEATHSIG); torchrun starts ranks from its main thread. Slurm needs
# nothing: slurmstepd ends the processes of a step. Ranks started by hand may outlive the shell that has started them.
# The agent may have ended before a rank asks. The new parent is then the process that collects orphans, which is no Python
# and has none of torchrun's variables; a wrapper script between agent and rank has them.


def end_with_agent(env: Env) -> None:
    """Have the kernel kill this rank when torchrun's agent ends, however it ends.

    Raises:
        LaunchError: the agent has ended already.
    """
    if any(name not in env for name in AGENT_VARIABLES):
        return
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        # before the parent is looked at: an agent that ends in between is seen by one of the two
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = os.getppid()
    if not _may_be_agent(parent, env["TORCHELASTIC_RUN_ID"]):
        raise LaunchError(Fault("torchrun", "has ended", got=f"parent process {parent}"))


def _may_be_agent(pid: int, run_id: str) -> bool:
    """Whether a process is a Python program, or has been started by one with torchrun's variables;
    True if it cannot be seen.
    """
    folder = Path("/proc", str(pid))
    with suppress(OSError):
        if "python" in Path(os.readlink(folder / "exe")).name:
            return True
        variables = (folder / "environ").read_bytes().split(b"\0")
        return f"TORCHELASTIC_RUN_ID={run_id}".encode() in variables
    return True


def restart_number(env: Env) -> int:
    """How often the agent has started the ranks of this job again; 0 at the first start."""
    for name in RESTART_VARIABLES:
        value = env.get(name, "0")
        if value.isdecimal() and int(value) > 0:
            return int(value)
    return 0
