"""Owns `init`: a plain script becomes one rank of a mesh with one line.

import weft

comm = weft.init("dp2 tp2")     # from here on four processes run this script
"""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from weft.comm.comm import Comm
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USER, RankError
from weft.run.crew import Crew, fork_ranks
from weft.run.fork import Child
from weft.run.launch import Telling, local_world, settle
from weft.run.rank import report
from weft.run.rank_setup import TIMEOUT_S, DeviceChoice, choose_device, open_comm, prepare_rank
from weft.run.signals import SignalQueue
from weft.run.world import World, detect


def init(
    mesh: str | Mesh, *, device: DeviceChoice = "auto", port: int | None = None, timeout_s: float = TIMEOUT_S
) -> Comm:
    """Be a rank of `mesh`: join the world that torchrun or Slurm has started, else make one on this machine.

    A world is made by forking this process: every rank goes on from here with a Comm of its own. The process that the
    user started stays behind: it waits for the ranks, tells the first error, and exits. So call it early, before
    anything is computed or a thread is started. A mesh of one rank is this process itself.

    Args:
        device: cpu, cuda, or auto: one GPU for each local rank where there are enough.
        port: where ranks that are made here meet; None: in a private file.
        timeout_s: how long a rank waits for the others.

    Raises:
        LaunchError: the world that is there is not as large as the mesh, or there are not enough GPUs.
    """
    shape = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    world = detect(os.environ) or _make_world(shape, device, port)
    chosen = choose_device(device, local_rank=world.local_rank, local_size=world.local_size)
    stack = ExitStack()
    atexit.register(stack.close)
    comm = stack.enter_context(open_comm(world, shape, chosen, timeout_s=timeout_s))
    prepare_rank(world.local_size)
    return comm


def _make_world(mesh: Mesh, device: DeviceChoice, port: int | None) -> World:
    choose_device(device, local_rank=0, local_size=mesh.size)
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    if mesh.size == 1:
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return local_world(0, 1, folder=folder, port=port)
    with SignalQueue() as signals:
        ours = fork_ranks(mesh.size, folder)
        if isinstance(ours, Crew):
            _stay_behind(ours, signals, folder=folder, telling=Telling(mesh))
    _report_at_the_end(ours)
    return local_world(ours.rank, mesh.size, folder=folder, port=port)


def _stay_behind(crew: Crew, signals: SignalQueue, *, folder: Path, telling: Telling) -> NoReturn:
    """Wait for the ranks, and exit as they did."""
    try:
        code = settle(crew, signals, folder=folder, telling=telling)
    except RankError as error:
        sys.stderr.write(f"error: {error}\n")
        code = EXIT_USER if error.kind == "user" else EXIT_FAILED
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    raise SystemExit(code)


def _report_at_the_end(child: Child) -> None:
    """Have an error that nobody catches travel to the parent instead of the screen."""

    def tell(kind: type[BaseException], error: BaseException, tb: TracebackType | None) -> None:
        if not isinstance(error, KeyboardInterrupt):
            report(error, rank=child.rank, pipe=child.pipe)

    sys.excepthook = tell
