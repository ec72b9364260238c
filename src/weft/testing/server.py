"""Owns the process that ranks are forked from: it has imported torch, has run none of it, and lives as long as its client.

    the caller --- one connection a run ---> chief (forked for the run) ---> one process a rank
                                             forks, collects, kills

Forking a process that has run OpenMP work hangs, and importing torch takes seconds: so a server imports it once and does
nothing else. Whoever goes away takes the rest along: the caller's end closes the server's input and the chief's
connection, and the chief kills its ranks.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from weft.testing.rank import Job, Outcome, play

PRELOAD = ("torch._dynamo", "weft.comm.ops")
"""What ranks need sooner or later and what takes long to import."""

GRACE_S = 0.3
"""After the first failure others have this long to say what happened to them; the cause may come after its effects."""


def main(listener: socket.socket) -> None:
    """Fork a chief for each connection, until standard input is closed."""
    for name in PRELOAD:
        importlib.import_module(name)
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the chiefs
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [])
        if sys.stdin in ready:
            return
        client, _ = listener.accept()
        connection = Connection(client.detach())
        _fork(functools.partial(_serve, connection))
        connection.close()


def _serve(client: Connection) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    chief = _Chief(client, client.recv())
    try:
        chief.start()
        chief.collect()
    finally:
        chief.kill()
    with suppress(OSError):  # the caller may be gone
        client.send((chief.outcomes, chief.stacks))


def _fork(life: Callable[[], None]) -> int:
    """A child that lives `life` and ends: it never returns into its parent's frames."""
    pid = os.fork()
    if pid:
        return pid
    try:
        life()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - there is nobody left to raise it to
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class _Chief:
    """Forks the ranks of one run, collects how they end, and leaves none behind."""

    def __init__(self, client: Connection, job: Job) -> None:
        self.client, self.job = client, job
        self.outcomes: dict[int, Outcome] = {}
        self.stacks: dict[int, str] = {}
        self._deadline = time.monotonic() + job.timeout_s
        self._pids: dict[int, int] = {}
        self._pipes: dict[Connection, int] = {}

    def start(self) -> None:
        """Fork the ranks."""
        for rank in range(self.job.mesh.size):
            self._start(rank)

    def collect(self) -> None:
        """Until all have ended, one has failed, time is up, or nobody listens any more."""
        while self._pipes:
            ready = wait([self.client, *self._pipes], timeout=max(0.0, self._deadline - time.monotonic()))
            if self.client in ready:
                break
            if not ready:
                self._look_at_late_ones()
                break
            for pipe in ready:
                assert isinstance(pipe, Connection), "only the client and pipes are waited for"
                self._hear(pipe)

    def kill(self) -> None:
        """End every rank that is still there."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        for pid in self._pids.values():
            os.waitpid(pid, 0)

    def _start(self, rank: int) -> None:
        here, there = Pipe(duplex=False)

        def life() -> None:
            for other in (self.client, here, *self._pipes):
                other.close()
            play(rank, self.job, there)

        pid = _fork(life)
        there.close()
        self._pids[rank], self._pipes[here] = pid, rank

    def _hear(self, pipe: Connection) -> None:
        rank = self._pipes.pop(pipe)
        try:
            outcome: Outcome = pipe.recv()
        except EOFError:
            _, status = os.waitpid(self._pids.pop(rank), 0)
            outcome = Outcome(rank, time.monotonic(), exit_code=os.waitstatus_to_exitcode(status))
        self.outcomes[rank] = outcome
        if outcome.value is None:
            self._deadline = min(self._deadline, time.monotonic() + GRACE_S)

    def _look_at_late_ones(self) -> None:
        files = {rank: Path(self.job.folder, f"stack-{rank}") for rank in self._pipes.values()}
        for rank in files:
            os.kill(self._pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not all(file.stat().st_size for file in files.values()):
            time.sleep(0.01)
        time.sleep(0.02)  # the last one may still be writing
        self.stacks = {rank: file.read_text() for rank, file in files.items()}


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])))
