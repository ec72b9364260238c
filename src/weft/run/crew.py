"""Owns the forked ranks of one parent: they are started, watched and ended together, and none outlives the call."""

from __future__ import annotations

import os
import pickle
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import torch

from weft.errors import EXIT_OK, EXIT_PREEMPTED, Fault, LaunchError
from weft.run.failure import Failure, describe_exit
from weft.run.fork import Child, fork_rank
from weft.run.signals import SignalQueue

POLL_S = 0.02
SETTLE_S = 0.3
"""After the first failure, time in which the others' reports may still show an earlier one."""
GRACE_S = 1.0
"""Time to end in after a signal, before SIGKILL."""
NEEDED_LATER = ("numpy.ma", "torch.fx.experimental.symbolic_shapes")
"""What the first step would import in every rank (a backward pass with given gradients: 485 modules, 0.4 s)."""
PENDING_UNTIL_READ = 1 << 16
EXIT_TERMINATED = 128 + signal.SIGTERM


def fork_ranks(size: int, folder: Path) -> Child | Crew:
    """Fork this process `size` times: each fork gets the Child that it is, the parent gets the Crew.

    Call it where no other thread runs and no tensor has been computed: OpenMP and CUDA do not survive a fork.

    Raises:
        LaunchError: the system refuses another process, or CUDA is in use.
    """
    if torch.cuda.is_initialized():
        what = "this process uses CUDA already, and CUDA does not survive a fork"
        raise LaunchError(Fault("ranks", what, fix="start the ranks before anything is computed, or use torchrun"))
    for name in NEEDED_LATER:
        with suppress(ImportError):
            import_module(name)
    crew = Crew()
    for rank in range(size):
        try:
            child = fork_rank(rank, folder / f"stack{rank}.txt")
        except OSError as error:
            crew.end(signal.SIGKILL)
            raise LaunchError(Fault("ranks", f"cannot start rank {rank} of {size}", got=str(error))) from error
        if child.pid == 0:
            return child
        crew.children.append(child)
    return crew


class Crew:
    """The children of this process.

    Attributes:
        failures: what went wrong by itself, in the order in which it was found; not what followed from being ended.
    """

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.failures: list[Failure] = []
        self._asked_to_leave = False

    def wait(self, signals: SignalQueue) -> None:
        """Until all have ended, by themselves or because one failed.

        SIGTERM and SIGUSR1 go on to the ranks as SIGTERM: they may save and leave with exit code 75. A second SIGTERM ends
        them. A pause (Ctrl-Z) pauses them too.

        Raises:
            KeyboardInterrupt: on SIGINT, when all have ended.
        """
        settled, terminated = float("inf"), False
        while self._alive():
            self._reap()
            if self.failures:
                settled = min(settled, time.monotonic() + SETTLE_S)
            if time.monotonic() >= settled:
                return self.end(signal.SIGTERM, signals)
            match signals.next():
                case signal.SIGINT:
                    self.end(signal.SIGINT, signals)
                    raise KeyboardInterrupt
                case signal.SIGTERM if terminated:
                    return self.end(signal.SIGKILL, signals)
                case signal.SIGTERM | signal.SIGUSR1 as number:
                    terminated = number == signal.SIGTERM
                    self._asked_to_leave = True
                    self._send(signal.SIGTERM)
                case signal.SIGTSTP:
                    self._pause()
            time.sleep(POLL_S)
        return None

    def end(self, number: int, signals: SignalQueue | None = None) -> None:
        """Send `number` to all that live, and SIGKILL to those that still do after a moment, or after one more signal."""
        failures = list(self.failures)
        self._send(number)
        deadline = time.monotonic() + GRACE_S
        while self._alive() and time.monotonic() < deadline and not (signals and signals.next()):
            self._reap()
            time.sleep(POLL_S)
        self._send(signal.SIGKILL)
        while self._alive():
            self._reap()
            time.sleep(POLL_S / 10)
        self.failures = failures

    def exit_code(self) -> int:
        """Of ranks that all ended without a failure."""
        codes = {child.code for child in self.children}
        if EXIT_PREEMPTED in codes:
            return EXIT_PREEMPTED
        return EXIT_TERMINATED if -signal.SIGTERM in codes else EXIT_OK

    def _alive(self) -> Sequence[Child]:
        return [child for child in self.children if child.code is None]

    def _send(self, number: int) -> None:
        for child in self._alive():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, number)

    def _pause(self) -> None:
        self._send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self._send(signal.SIGCONT)

    def _reap(self) -> None:
        for child in self._alive():
            if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                continue
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # what the rank has started and left behind
            child.code = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
            if (failure := self._failure_of(child, child.code)) is not None:
                self.failures.append(failure)

    def _failure_of(self, child: Child, code: int) -> Failure | None:
        said = _read(child.pipe)
        if said or code in (EXIT_OK, EXIT_PREEMPTED) or (self._asked_to_leave and code == -signal.SIGTERM):
            return said
        stack = child.stack_file.read_text(errors="replace") if child.stack_file.exists() else ""
        return describe_exit(code, rank=child.rank, at_s=time.monotonic(), trace=stack)


def _read(pipe: int) -> Failure | None:
    """The last word of a rank that has ended."""
    with suppress(BlockingIOError), open(pipe, "rb", buffering=0) as file:
        if data := file.read(PENDING_UNTIL_READ):
            failure = pickle.loads(data)
            assert isinstance(failure, Failure), f"a rank sent {type(failure)}"
            return failure
    return None
