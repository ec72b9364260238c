"""Whether a fork of this process can compute with several threads: tried with a fork that does nothing else.

OpenMP keeps the threads of an operation for the next one. A fork has its memory, in which they still
exist, but not the threads: its first operation with several threads waits for them for ever. No
function says whether they have been started; those of other libraries survive a fork.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

NUM_ENTRIES = 2**17
"""Of an operation that torch computes with several threads."""
POLL_S = 0.005
MOST_S = 20.0
MANY_POLLS = 40
"""As often in turn all threads of the fork must be found asleep: they wait for those that are missing."""


def survives_fork() -> bool:
    """Whether an operation with several threads ends in a fork of this process; about 20 ms."""
    try:
        pid = os.fork()
    except OSError:
        return True  # the forks of the ranks say why
    if pid == 0:
        torch.set_num_threads(max(2, torch.get_num_threads()))
        # large enough for several threads: a small operation would end in any fork
        torch.ones(NUM_ENTRIES).exp_()
        os._exit(0)
    try:
        return _ends(pid)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _ends(pid: int) -> bool:
    """Whether a child ends, rather than wait for threads that it does not have."""
    num_asleep = 0
    deadline = time.monotonic() + MOST_S
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return True
        # in a row: a thread that waits for a page or a lock sleeps for a moment, too
        num_asleep = num_asleep + 1 if _are_all_asleep(pid) else 0
        if num_asleep == MANY_POLLS:
            return False
        time.sleep(POLL_S)
    return False


def _are_all_asleep(pid: int) -> bool:
    """Whether every thread of a process sleeps: none of them is left to wake another."""
    try:
        states = [
            stat.read_text().rpartition(") ")[2][:1]
            for stat in Path(f"/proc/{pid}").glob("task/*/stat")
        ]
    except OSError:  # one has just ended
        return False
    return bool(states) and set(states) == {"S"}
