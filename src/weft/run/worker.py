"""Worker processes: forking one rank, detaching it from the parent's terminal and signals, reporting how it ended."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USER
from weft.run.failure import RankFailure, describe_error
from weft.run.signals import SignalQueue

PR_SET_PDEATHSIG = 1
STACK_SIGNAL = signal.SIGUSR2
"""A worker that receives it writes the stack of each of its threads to its stack file."""


# Note [Orderly ends]
# The exit code of a process does not say that its function has returned: user code may call os._exit(0) or sys.exit(0). So
# a rank reports its end through its pipe: `RankResult` when its function has returned, or was left by `OrderlyEnd`. An end
# without a report is a failure, whatever the code.


class OrderlyEnd(SystemExit):
    """Raised by a rank that ends before its function returns, on purpose: its code is that of the
    run. Any other SystemExit is an error of user code. See Note [Orderly ends].
    """


@dataclass(frozen=True)
class RankResult:
    """The function of one rank has ended in order; `value` is what it returned, pickled."""

    rank: int
    value: bytes = b""


@dataclass
class WorkerProcess:
    """One forked rank. In the parent: its process. In the rank itself: pid 0.

    Attributes:
        pipe: the reading end in the parent, the writing end in the rank; carries a report, and
            where it failed early, another one of the same error.
        stack_file: where a crash or STACK_SIGNAL writes the stacks.
        exit_code: None while it runs; a signal's number negated.
    """

    rank: int
    pid: int
    pipe: Connection
    stack_file: Path
    report: RankFailure | RankResult | None = None
    exit_code: int | None = None

    def stack(self) -> str:
        """What was written to the stack file; "" if nothing was."""
        if not self.stack_file.exists():
            return ""
        return self.stack_file.read_text(errors="replace")


def fork_worker(rank: int, stack_file: Path, *, close: Iterable[Connection] = ()) -> WorkerProcess:
    """Fork this process; the parent and the child both return, each with its WorkerProcess.

    Args:
        close: connections of the parent that the child closes.

    Raises:
        OSError: the system cannot start another process.
    """
    parent = os.getpid()
    reader, writer = Pipe(duplex=False)
    flush_output()
    # until the child has its own handlers: a signal in between would be queued there and not be seen
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, SignalQueue.SIGNALS)
    try:
        pid = os.fork()
        if pid == 0:
            for connection in (reader, *close):
                connection.close()
            try:
                detach(parent, stack_file=stack_file)
            except BaseException as error:  # noqa: BLE001 - the parent raises it
                exit_now(send_failure(error, rank=rank, pipe=writer))
            return WorkerProcess(rank, pid, writer, stack_file)
        with suppress(OSError):
            os.setpgid(pid, pid)  # the child does so too: the first of the two calls counts
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
    writer.close()
    return WorkerProcess(rank, pid, reader, stack_file)


def detach(parent: int, *, stack_file: Path) -> None:
    """Give a fresh fork a process group, default signal handlers and an empty stdin, and end it
    when its parent ends.
    """
    # a group of its own: Ctrl-C of the terminal goes to the launcher alone, which decides
    os.setpgid(0, 0)
    for number in SignalQueue.SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(
        signal.SIGTTOU, signal.SIG_IGN
    )  # rank 0 may write to a terminal in the mode `stty tostop`
    end_with_parent(parent)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    # kept open for as long as the process: a crash cannot open files
    stacks = stack_file.open("w")
    faulthandler.enable(stacks)
    faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=True)


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends; exit if the parent has ended already."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # after the request: a parent that ended before it would not be noticed by the kernel
    if os.getppid() != parent:
        os._exit(EXIT_FAILED)


def run_worker(fn: Callable[[], None], *, rank: int, pipe: Connection) -> int:
    """Call `fn`; the exit code, after its end or error was sent through `pipe`."""
    code = EXIT_OK
    try:
        fn()
    except OrderlyEnd as end:
        code = exit_code_of(end)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - the parent raises it
        return send_failure(error, rank=rank, pipe=pipe)
    pipe.send(RankResult(rank))
    return code


def send_failure(error: BaseException, *, rank: int, pipe: Connection) -> int:
    """Report an error to the parent; the exit code."""
    failure = describe_error(error, rank=rank, at_s=time.monotonic())
    pipe.send(failure)
    return EXIT_USER if failure.kind == "user" else EXIT_FAILED


def exit_code_of(stop: SystemExit) -> int:
    """The exit code of a process that raises `stop`."""
    if isinstance(stop.code, int):
        return stop.code
    return EXIT_OK if stop.code is None else EXIT_FAILED


def exit_now(code: int) -> NoReturn:
    """End this process at once: without the parent's exit handlers and without joining threads."""
    flush_output()
    os._exit(code)


def flush_output() -> None:
    """Flush stdout and stderr, ignoring closed ones."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
