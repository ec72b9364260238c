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

from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER
from weft.run.failure import describe

PR_SET_PDEATHSIG = 1


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
