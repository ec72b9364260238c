"""Owns how a process becomes a rank: memory, threads, numerics, signals, and its last word to the parent."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER
from weft.run.failure import describe

# Note [Memory of a rank]
# glibc maps and unmaps every block of 32 MB or more, and gives the top of the heap back: each step faults its pages in
# anew. The settings of `keep_memory` do what the environment variables MALLOC_MMAP_THRESHOLD_, MALLOC_TRIM_THRESHOLD_ and
# MALLOC_TOP_PAD_ do, without starting the process again. Measured, GPT of 10.7 M parameters, 8,192 tokens a step, 1 thread:
#
#     as it is      1,190 tokens/s     228,000 page faults a step    1.89 GB at most
#     variables     1,276               12,000                        1.96
#     keep_memory   1,269               13,000                        1.99

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -2, -3, -4
LARGEST = 2**31 - 1
PAD_BYTES = 2**28
PR_SET_PDEATHSIG = 1


def prepare(local_size: int) -> None:
    """Set up this process (or thread) to compute as one of `local_size` ranks of this machine."""
    keep_memory()
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, num_cores() // local_size))
    torch.set_flush_denormal(True)


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_memory() -> None:
    """Keep freed memory for the next step; see Note [Memory of a rank]."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    _ = mallopt(M_MMAP_THRESHOLD, LARGEST) or mallopt(M_MMAP_MAX, 0)
    mallopt(M_TRIM_THRESHOLD, LARGEST)
    mallopt(M_TOP_PAD, PAD_BYTES)


def detach(parent: int, *, stack_file: Path) -> None:
    """Make a fresh fork a process of its own: its group, its signals, no keyboard, and no life after its parent."""
    os.setpgid(0, 0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # rank 0 may write to a terminal where `stty tostop` is set
    _die_with(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.enable(stack_file.open("w"))


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent is gone, and see whether it is gone already."""
    if (prctl := getattr(ctypes.CDLL(None), "prctl", None)) is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def play(act: Callable[[], None], *, rank: int, pipe: int) -> int:
    """Call `act`; the exit code, after what went wrong was put into `pipe`."""
    try:
        act()
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else int(leave.code is not None)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - it goes on in the parent
        return report(error, rank=rank, pipe=pipe)
    return 0


def report(error: BaseException, *, rank: int, pipe: int) -> int:
    """Tell the parent; the exit code."""
    failure = describe(error, rank=rank, at_s=time.monotonic())
    os.write(pipe, pickle.dumps(failure))
    return EXIT_USER if failure.kind == "user" else EXIT_FAILED


def leave(code: int) -> NoReturn:
    """End this process now: no exit handlers of the parent, no waiting for threads."""
    flush()
    os._exit(code)


def flush() -> None:
    """Send on what was printed, as far as somebody takes it."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
