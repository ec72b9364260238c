"""Fork server: a process that has imported torch and computed nothing, from which `run_ranks` forks its rank processes.

    caller --- one connection a run ---> supervisor (forked for the run) ---> one worker process a
    rank
                                         holds the WorkerGroup

Forking a process that has run OpenMP work hangs, and importing torch takes seconds: so the server
imports it once and computes nothing. When the caller ends, the server reaches the end of its input
and the supervisor that of its connection, and the workers are killed.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

import cloudpickle  # noqa: TID251 - between this process and its own children
import torch

from weft.comm.comm import Comm
from weft.comm.interfaces import LOOPBACK
from weft.comm.process_groups import ProcessTransport
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, EXIT_OK
from weft.run.failure import RankFailure, describe_error
from weft.run.worker import RankResult, WorkerProcess, exit_now
from weft.run.worker_group import PRELOAD, WorkerGroup, fork_workers

SERVER_PRELOAD = ("torch._dynamo", "weft.comm.ops", *PRELOAD)
"""Modules that ranks import sooner or later and that take long to import."""
START = "import sys; from weft.run.fork_server import serve; serve(int(sys.argv[1]), sys.argv[2:])"
OWN_MODULES = f"{__name__.partition('.')[0]}."
"""Modules of this package that the caller has imported are imported once by the server, not by each
rank. Other modules are not: importing them may compute.
"""
POLL_S = 0.1


@dataclass(frozen=True)
class Job:
    """One run: the pickled function `fn(comm)`, and the surroundings of the caller that its ranks
    take over; `random_state` is that of torch's default CPU generator.
    """

    mesh: Mesh
    fn: bytes
    folder: str
    timeout_s: float
    comm_timeout_s: float
    cwd: str
    environ: dict[str, str]
    path: tuple[str, ...]
    argv: tuple[str, ...]
    random_state: bytes


@dataclass(frozen=True)
class JobOutcome:
    """How a run ended: pickled results by rank, failures, and the stacks of the ranks that did not
    finish in time.
    """

    results: dict[int, bytes]
    failures: tuple[RankFailure, ...]
    stacks: dict[int, str]


class ForkServer:
    """The caller's side: starts the server process, which ends with this process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._address = str(Path(self._folder.name, "socket"))
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen()
            self._process = subprocess.Popen(  # noqa: S603 - this Python, with a module of weft
                [sys.executable, "-c", START, str(listener.fileno()), *_imported_modules()],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            )
        atexit.register(self.stop)

    def run(self, job: Job) -> JobOutcome:
        """Run a job and wait for its end."""
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(self._address)
            connection = Connection(client.detach())
        with connection:
            connection.send(job)
            outcome: JobOutcome = connection.recv()
            return outcome

    def stop(self) -> None:
        """End the server by closing its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


@functools.cache
def fork_server() -> ForkServer:
    """The server of this process, started at the first call."""
    return ForkServer()


def _imported_modules() -> list[str]:
    """Modules of this package that this process has imported."""
    return [name for name in sys.modules if name.startswith(OWN_MODULES)]


def serve(listener_fd: int, modules: Sequence[str] = ()) -> None:
    """Entry point of the server process: import `modules`, then fork a supervisor for each
    connection until standard input is closed.
    """
    for name in (*SERVER_PRELOAD, *modules):
        with suppress(ImportError):  # the caller may have made a module that no file contains
            importlib.import_module(name)
    # after the imports: a collection in a fork would copy the pages of all these objects
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the supervisors
    listener = socket.socket(fileno=listener_fd)
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return
        client, _ = listener.accept()
        connection = Connection(client.detach())
        _fork_supervisor(functools.partial(_supervise_job, connection))
        connection.close()


def _fork_supervisor(fn: Callable[[], None]) -> None:
    """Call `fn` in a child process that never returns into the frames of its parent."""
    if os.fork() != 0:
        return
    try:
        fn()
    except BaseException:  # noqa: BLE001 - the supervisor has no caller
        traceback.print_exc()
        exit_now(EXIT_FAILED)
    exit_now(EXIT_OK)


def _supervise_job(client: Connection) -> None:
    # the server has it ignored, and the ends of ignored children cannot be waited for
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    job: Job = client.recv()
    forked = fork_workers(job.mesh.size, Path(job.folder), close=client)
    if isinstance(forked, WorkerProcess):
        _run_job(job, forked)
        exit_now(EXIT_OK)
    try:
        stacks = _wait(forked, client, timeout_s=job.timeout_s)
    finally:
        forked.kill()
    with suppress(OSError):  # the caller may have ended
        client.send(JobOutcome(forked.results(), tuple(forked.failures), stacks))


def _wait(group: WorkerGroup, client: Connection, *, timeout_s: float) -> dict[int, str]:
    """Wait until all workers have ended, one has failed, or the caller has ended; after
    `timeout_s`, the late stacks.
    """
    deadline = time.monotonic() + timeout_s
    while group.running() and not group.is_settled():
        if time.monotonic() >= deadline:
            return group.stacks()
        if group.poll(POLL_S, client=client):
            return {}
    return group.stacks()


def _run_job(job: Job, worker: WorkerProcess) -> None:
    """Be one rank of `job`: call its function and report the result or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides what Ctrl-C ends
    os.chdir(job.cwd)
    # in place: torch and others hold this object
    os.environ.clear()
    os.environ.update(job.environ)
    sys.path[:] = job.path
    sys.argv[:] = job.argv
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    report: RankResult | RankFailure
    try:
        value = _call(job, worker.rank)
        report = RankResult(worker.rank, cloudpickle.dumps(value))
    except BaseException as error:  # noqa: BLE001 - raised again by the caller
        failure = describe_error(error, rank=worker.rank, at_s=time.monotonic())
        report = replace(failure, exception=_pickle_exception(error))
    worker.pipe.send(report)


def _call(job: Job, rank: int) -> object:
    transport = ProcessTransport(
        rank,
        job.mesh.size,
        f"file://{job.folder}/store",
        timeout_s=job.comm_timeout_s,
        address=LOOPBACK,
    )
    comm = Comm(job.mesh, rank, transport)
    fn = cloudpickle.loads(job.fn)
    state = bytearray(job.random_state)
    torch.set_rng_state(torch.frombuffer(state, dtype=torch.uint8))
    return fn(comm)


def _pickle_exception(error: BaseException) -> bytes:
    """The pickled exception; b"" if it cannot be unpickled again."""
    try:
        data: bytes = cloudpickle.dumps(error)
        # some exceptions are pickled and cannot be made again, which the caller must not find out
        cloudpickle.loads(data)
    except Exception:  # noqa: BLE001 - its text is reported instead
        return b""
    return data
