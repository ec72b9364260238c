"""Owns forking one rank: from this process to a process of its own, with a pipe for its last word."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from weft.run.rank import detach, flush, leave, play
from weft.run.signals import SignalQueue


@dataclass
class Child:
    """A forked rank: in the parent with its process, in itself with pid 0. `pipe` carries its last word."""

    rank: int
    pid: int
    pipe: int
    stack_file: Path
    code: int | None = None


def fork_rank(rank: int, stack_file: Path) -> Child:
    """Fork this process; the parent and the fork both get the Child.

    Raises:
        OSError: the system refuses another process.
    """
    parent = os.getpid()
    reading, writing = os.pipe()
    flush()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SignalQueue.SIGNALS)
    try:
        if (pid := os.fork()) == 0:
            os.close(reading)
            if code := play(lambda: detach(parent, stack_file=stack_file), rank=rank, pipe=writing):
                leave(code)
            return Child(rank, 0, writing, stack_file)
        with suppress(OSError):
            os.setpgid(pid, pid)  # the child does so too: whoever comes first
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    os.close(writing)
    os.set_blocking(reading, False)
    return Child(rank, pid, reading, stack_file)
