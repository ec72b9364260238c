"""Launching local ranks as processes or threads, and joining the ranks that torchrun or Slurm has started."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from weft.comm.interfaces import LOOPBACK, listen
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.errors import EXIT_OK, Fault, LaunchError
from weft.run.failure import ErrorContext, describe_error, root_cause
from weft.run.rank_setup import TIMEOUT_S, DeviceChoice, choose_device, prepare_rank
from weft.run.rank_threads import run_rank_threads
from weft.run.signals import SignalQueue
from weft.run.worker import WorkerProcess, exit_code_of, exit_now, run_worker
from weft.run.worker_group import WorkerGroup, fork_workers, supervise
from weft.run.world import ThreadRendezvous, World

RankMain = Callable[[World], None]
SECONDARY_DELAY_S = 2.0


def launch(
    main: RankMain,
    nproc: int,
    *,
    transport: Literal["process", "threads"] = "process",
    device: DeviceChoice = "auto",
    port: int | None = None,
    mesh: Mesh | None = None,
    out: Path | None = None,
) -> int:
    """Call `main(world)` on `nproc` local ranks, and wait for them.

    Processes are forks of this one: call it from the main thread, before any tensor has been
    computed. When a rank fails or on Ctrl-C, all are ended; none is left when this function returns
    or raises, or this process is killed.

    Args:
        device: validated before a rank starts, so that a missing GPU is one error.
        port: TCP port of the rendezvous, on loopback; None: a private file.
        mesh: for the coordinates in an error.
        out: run folder, for the traceback of an error.

    Returns:
        0, or 75 if ranks saved and stopped on SIGTERM or SIGUSR1, or 143 if they stopped without
        saving.

    Raises:
        RankError: the first failing rank's error.
        LaunchError: the ranks cannot be started.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    devices = [choose_device(device, local_rank=rank, local_size=nproc) for rank in range(nproc)]
    context = ErrorContext(mesh, out)
    if transport == "threads":
        return _launch_threads(
            main, ThreadWorld(nproc, devices=devices, timeout_s=TIMEOUT_S), context
        )
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    nonce = secrets.token_hex(16)
    with SignalQueue() as signals, open_listener(port) as listener:
        forked = fork_workers(nproc, folder)
        if isinstance(forked, WorkerProcess):
            world = local_world(forked.rank, nproc, folder=folder, nonce=nonce, listener=listener)
            exit_now(run_worker(lambda: _run_main(main, world), rank=forked.rank, pipe=forked.pipe))
        return wait_for_workers(forked, signals, folder=folder, context=context)


def join(main: RankMain, world: World, *, mesh: Mesh | None = None, out: Path | None = None) -> int:
    """Call `main(world)` in this process, which is one rank of an existing world; 0 when it has
    returned.

    torchrun and Slurm end all ranks when one ends. So a rank with a secondary failure, or with an
    error that rank 0 has too, waits SECONDARY_DELAY_S, in which it is usually ended, before it
    reports.

    Raises:
        RankError: what went wrong, with this rank's coordinates.
    """
    try:
        _run_main(main, world)
    except Exception as error:
        failure = describe_error(error, rank=world.rank, at_s=time.monotonic())
        is_repeated = failure.kind in ("user", "all ranks") and world.rank > 0
        if failure.kind == "secondary" or is_repeated:
            time.sleep(SECONDARY_DELAY_S)
        raise ErrorContext(mesh, out).to_error(failure) from error
    return EXIT_OK


@contextmanager
def open_listener(port: int | None) -> Iterator[socket.socket | None]:
    """The socket on which rank 0's store will listen; opened before ranks start, so that one of two
    launches on a port starts none.

    Raises:
        LaunchError: the port is taken.
    """
    if port is None:
        yield None
        return
    try:
        listener = listen(LOOPBACK, port)
    except OSError as error:
        got = f"{port}: {error.strerror}"
        fix = "choose another --port, or leave it out for a private file"
        raise LaunchError(Fault("port", "cannot be opened", got=got, fix=fix)) from error
    with listener:
        yield listener


def local_world(
    rank: int,
    size: int,
    *,
    folder: Path,
    nonce: str,
    listener: socket.socket | None = None,
) -> World:
    """The world of one of `size` local ranks; called in that rank.

    Args:
        folder: private, holds the store if there is no `listener`.
        nonce: random name of the world.
    """
    rendezvous = f"file://{folder}/store"
    file = None
    if listener is not None:
        rendezvous = f"tcp://{LOOPBACK}:{listener.getsockname()[1]}"
        if rank == 0:
            file = os.dup(listener.fileno())
        listener.close()
    return World(
        rank,
        size,
        local_rank=rank,
        local_size=size,
        rendezvous=rendezvous,
        nonce=nonce,
        listener=file,
    )


def wait_for_workers(
    group: WorkerGroup, signals: SignalQueue, *, folder: Path, context: ErrorContext
) -> int:
    """Supervise a group to its end and remove its folder; the exit code. Raises as `launch`."""
    try:
        supervise(group, signals)
    finally:
        group.kill()
        shutil.rmtree(folder, ignore_errors=True)
    if group.failures:
        raise context.to_error(root_cause(group.failures))
    return group.exit_code()


def _run_main(main: RankMain, world: World) -> None:
    prepare_rank(world.local_size)
    main(world)


def _launch_threads(main: RankMain, threads: ThreadWorld, context: ErrorContext) -> int:
    def run_rank(rank: int) -> int:
        rendezvous = ThreadRendezvous(threads)
        world = World(
            rank, threads.size, local_rank=rank, local_size=threads.size, rendezvous=rendezvous
        )
        try:
            _run_main(main, world)
        except SystemExit as stop:
            return exit_code_of(stop)
        return EXIT_OK

    run = run_rank_threads(run_rank, threads, daemon=False)
    if run.failures:
        raise context.to_error(root_cause(run.failures))
    return max(run.results.values(), default=EXIT_OK)
