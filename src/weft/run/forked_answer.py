"""A function that computes in a forked process; its answer is read as JSON by this process and by its later forks. No torch."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from weft.errors import WeftError
from weft.run.worker import end_with_parent, flush_output

Answer = Mapping[str, Any]
FAILURE = "failure"
"""Key of an answer that says why there is no other."""


class RunningAnswer(Protocol):
    """The answer of a function, which may still compute."""

    def wait(self) -> Answer:
        """The answer, when it is there."""

    def poll(self, patience_s: float = 0.0) -> Answer | None:
        """The answer, if it is there in time."""

    def end(self) -> None:
        """End the computation, if it still runs."""


class StartAnswer(Protocol):
    """Starts the computation of an answer."""

    def __call__(self, function: Callable[[], Answer], *, niceness: int = 0) -> RunningAnswer: ...


class ForkedAnswer:
    """The answer of a function that computes in a forked process.

    Note [Answer of a forked process]
        The process inherits the end of a pipe, which it holds open until it ends, and a file without
        a name, which receives its answer. Forks of the parent inherit the other end and the file: each
        can wait until the process has ended, and read the answer, any number of times.

    Args:
        function: its result must be JSON; an exception becomes an answer with the key "failure".
        niceness: is added to that of this process.
    """

    def __init__(self, function: Callable[[], Answer], *, niceness: int = 0) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._reader, writer = os.pipe()
        # else what is buffered would be written by both processes
        flush_output()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._reader)
            end_with_parent(parent)
            # a collection of what threads of the parent left has ended in a segmentation fault
            gc.freeze()
            os.nice(niceness)
            _answer_and_exit(function, self._file.fileno())
        # from here on the child alone holds this end: the pipe ends with it
        os.close(writer)

    def wait(self) -> Answer:
        """The answer, when the process has ended; in this process, or in one that it has forked."""
        os.read(self._reader, 1)  # nothing is written: it returns at the end of the pipe
        file = self._file.fileno()
        # read at a place and not from the position of the file, which all forks share
        size = os.fstat(file).st_size
        text = os.pread(file, size, 0)
        if not text:
            return {FAILURE: "its process has ended without an answer"}
        answer: Answer = json.loads(text)
        return answer

    def poll(self, patience_s: float = 0.0) -> Answer | None:
        """The answer, if it is there in time."""
        ended, _, _ = select.select([self._reader], [], [], patience_s)
        return self.wait() if ended else None

    def end(self) -> None:
        """End the process, if it still runs; called by the process that started it."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._reader)
        self._file.close()


def _answer_and_exit(function: Callable[[], Answer], file: int) -> NoReturn:
    """Write the answer to a file; the process ends here."""
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        answer = answer_of(function)
        os.pwrite(file, json.dumps(answer).encode(), 0)
        code = 0
    finally:
        os._exit(code)


def answer_of(function: Callable[[], Answer]) -> Answer:
    """The answer of a function, or why there is none."""
    try:
        return function()
    except WeftError as error:
        return {FAILURE: str(error)}
    except Exception as error:  # noqa: BLE001 - reported by the readers
        return {FAILURE: f"{type(error).__name__}: {error}"}
