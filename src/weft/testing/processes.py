"""Owns ranks played by processes over gloo: asks the fork server for a run and tells how it ended."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.errors import CommError, CommTimeout, RankError
from weft.testing.carry import pack, unpack
from weft.testing.rank import Job, Outcome
from weft.testing.threads import COMM_SHARE

T = TypeVar("T")


def run_in_processes(mesh: Mesh, fn: Callable[[Comm], T], *, timeout_s: float) -> list[T]:
    """See `run_ranks`."""
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(
            mesh,
            pack(fn),
            folder,
            timeout_s=timeout_s,
            comm_timeout_s=COMM_SHARE * timeout_s,
            cwd=os.getcwd(),
            environ=dict(os.environ),
            path=tuple(sys.path),
            argv=tuple(sys.argv),
        )
        outcomes, stacks = _server().run(job)
    failed = [outcome for outcome in outcomes.values() if outcome.value is None]
    if failed:
        raise _with_stacks(_error(mesh, _first(failed)), stacks)
    if len(outcomes) < mesh.size:
        names = ", ".join(f"{rank} ({mesh.coord_text(rank)})" for rank in stacks)
        raise _with_stacks(CommTimeout(f"rank {names} of mesh {mesh} did not finish within {timeout_s:g} s"), stacks)
    return [unpack(outcomes[rank].value or b"") for rank in range(mesh.size)]


class _Server:
    """The client's side of `weft.testing.server`, which is started here and ends with this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._address = str(Path(self._folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "weft.testing.server", str(listener.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        atexit.register(self.stop)

    def run(self, job: Job) -> tuple[dict[int, Outcome], dict[int, str]]:
        """Have `job` played; outcomes by rank, and where those are who were too late."""
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self._address)
            with Connection(line.detach()) as connection:
                connection.send(job)
                answer: tuple[dict[int, Outcome], dict[int, str]] = connection.recv()
                return answer

    def stop(self) -> None:
        """Close its input, which ends it."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        self.process.wait()
        self._folder.cleanup()


@functools.cache
def _server() -> _Server:
    return _Server()


def _first(failed: list[Outcome]) -> Outcome:
    """The earliest cause: errors between ranks count only where nothing else went wrong, they follow from others."""
    return min(failed, key=lambda outcome: (outcome.is_comm_error, outcome.at_s))


def _error(mesh: Mesh, outcome: Outcome) -> BaseException:
    if outcome.error is not None:
        error: BaseException = unpack(outcome.error)
        error.__notes__ = list(outcome.notes)
        return error
    code = outcome.exit_code or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return RankError(outcome.rank, mesh.coord_text(outcome.rank), f"the process {how} before its function returned")


def _with_stacks(error: BaseException, stacks: dict[int, str]) -> BaseException:
    """`error`; if it is about ranks that wait for others, with notes that show where those are."""
    for rank, stack in stacks.items() if isinstance(error, CommError) else ():
        error.add_note(f"rank {rank} is at:\n{stack}")
    return error
