"""`init`: one line that turns a plain script into the ranks of a mesh.

import weft

comm = weft.init("dp2 tp2")     # from here on four processes run this script
"""

from __future__ import annotations

import atexit
import gc
import os
import secrets
import sys
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import NoReturn

from weft.comm.comm import Comm
from weft.comm.process_groups import SCRIPT_WORLD, script_world
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER, RankError
from weft.run.devices import DeviceChoice, choose_device, devices_of_local_ranks
from weft.run.failure import ErrorContext
from weft.run.launch import local_world, open_listener, wait_for_workers
from weft.run.private_folder import PrivateFolder
from weft.run.rank_setup import TIMEOUT_S, open_comm, prepare_rank
from weft.run.rank_status import StatusBoard
from weft.run.signals import SignalQueue
from weft.run.worker import WorkerProcess, send_failure
from weft.run.worker_group import WorkerGroup, fork_workers
from weft.run.world import Attempt, World, detect


def init(
    mesh: str | Mesh,
    *,
    device: DeviceChoice = "auto",
    port: int | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Comm:
    """Become a rank of `mesh`: of the world that the script has initialised torch.distributed with, else
    of that which torchrun or Slurm has started, else of one that is created on this machine.

    A world is created by forking this process: every rank continues from here with a Comm of its
    own. The process that the user started waits for the ranks, prints the first error, and exits.
    So call it early, before anything is computed or a thread is started; where threads of OpenMP,
    autograd or CUDA run, which a fork does not survive, this is an error. A mesh of one rank is this
    process itself.

    Args:
        device: cpu, cuda, or auto: one GPU for each local rank if there are enough.
        port: TCP port of the rendezvous of ranks created here; None: a private file.
        timeout_s: time-out of a collective.

    Raises:
        LaunchError: the size of the existing world differs from the mesh, or there are not enough
            GPUs, or this process cannot be forked any more.
    """
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    started = detect(os.environ)
    world = _script_world(started) or started or _create_world(shape, device, port)
    chosen = choose_device(device, world)
    stack = ExitStack()
    atexit.register(stack.close)
    comm = stack.enter_context(open_comm(world, shape, chosen, timeout_s=timeout_s))
    prepare_rank(world.local_size)
    return comm


def _script_world(started: World | None) -> World | None:
    """The world of torch.distributed, if the script has initialised it; its store is used, since a second
    one cannot listen on the same port.

    Args:
        started: by torchrun or Slurm, which know the local rank; without them all ranks are on this
            machine.
    """
    found = script_world()
    if found is None:
        return None
    rank, size = found
    if started is not None:
        return replace(started, rank=rank, size=size, rendezvous=SCRIPT_WORLD)
    return World(rank, size, local_rank=rank, local_size=size, rendezvous=SCRIPT_WORLD)


def _create_world(mesh: Mesh, device: DeviceChoice, port: int | None) -> World:
    """Fork the ranks of `mesh`. Returns in the ranks only."""
    # before the fork: a missing GPU is one error and not one of each rank
    devices_of_local_ranks(device, mesh.size, "fork")
    folder = PrivateFolder()
    nonce = secrets.token_hex(16)
    if mesh.size == 1:
        atexit.register(folder.remove)
        return local_world(0, 1, folder=folder.path, nonce=nonce)
    # mapped before the fork: all ranks inherit it
    board = StatusBoard.create(folder.path / "board", mesh.size)
    with SignalQueue() as signals, open_listener(port) as listener:
        forked = fork_workers(mesh.size, folder.path, mesh=mesh, are_scripts=True)
        if isinstance(forked, WorkerGroup):
            with folder:
                _wait_and_exit(forked, signals, board, context=ErrorContext(mesh))
        world = local_world(
            forked.rank, mesh.size, folder=folder.path, nonce=nonce, listener=listener
        )
    _report_uncaught_errors(forked)
    status = board.rank(forked.rank)
    status.begin(attempt=0)
    return replace(world, attempt=Attempt(status))


def _wait_and_exit(
    group: WorkerGroup, signals: SignalQueue, board: StatusBoard, *, context: ErrorContext
) -> NoReturn:
    """Wait for the ranks, and exit with their exit code."""
    try:
        code = wait_for_workers(group, signals, board, context=context)
    except RankError as error:
        sys.stderr.write(f"error: {error}\n")
        code = EXIT_USER if error.kind == "user" else EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    gc.freeze()  # as at the end of a command: what was imported is not collected
    raise SystemExit(code)


def _report_uncaught_errors(worker: WorkerProcess) -> None:
    """Send an uncaught error to the parent instead of printing it."""

    def report(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            send_failure(error, rank=worker.rank, pipe=worker.pipe)

    sys.excepthook = report
