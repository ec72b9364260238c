"""Owns starting the ranks of this machine and saying how they ended."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.core.mesh import Mesh
from weft.errors import EXIT_OK, RankError
from weft.run.crew import Crew, fork_ranks
from weft.run.failure import TRACE, Failure, describe, first_of, to_error
from weft.run.fork import Child
from weft.run.rank import leave, play
from weft.run.rank_setup import DeviceChoice, choose_device, prepare_rank
from weft.run.signals import SignalQueue
from weft.run.threads import play_threads
from weft.run.world import World

Main = Callable[[World], None]
LOCALHOST = "127.0.0.1"
PATIENCE_S = 2.0


@dataclass(frozen=True)
class Telling:
    """How a failure is told: the mesh gives coordinates, the folder takes the traceback."""

    mesh: Mesh | None = None
    out: Path | None = None

    def error(self, failure: Failure) -> RankError:
        """The error that the person sees."""
        where = self.mesh.coord_text(failure.rank) if self.mesh else "no mesh"
        return to_error(failure, where, out=self.out, show_trace=bool(os.environ.get(TRACE)))


def launch(
    main: Main,
    nproc: int,
    *,
    transport: Literal["process", "threads"] = "process",
    device: DeviceChoice = "auto",
    port: int | None = None,
    mesh: Mesh | None = None,
    out: Path | None = None,
) -> int:
    """Call `main(world)` on `nproc` local ranks, and wait for them.

    Processes are forks of this one: call it before any tensor has been computed and from the main thread. When a rank
    fails the others are ended; Ctrl-C ends all; none is left when this returns, raises or is killed.

    Args:
        device: looked at before a rank starts, so that a missing GPU is one error.
        port: ranks meet there, on this machine; None: in a private file.
        mesh: gives the coordinates in an error.
        out: run folder, takes the traceback of an error.

    Returns:
        0, or 75 if ranks saved and left on SIGTERM or SIGUSR1, or 143 if they left without.

    Raises:
        RankError: the first failing rank's error.
        LaunchError: they cannot be started.
        KeyboardInterrupt: Ctrl-C; all ranks have ended.
    """
    devices = [choose_device(device, local_rank=rank, local_size=nproc) for rank in range(nproc)]
    telling = Telling(mesh, out)
    if transport == "threads":
        ended = play_threads(main, devices)
        if ended.failures:
            raise telling.error(first_of(ended.failures))
        return ended.code
    folder = Path(tempfile.mkdtemp(prefix="weft-"))
    with SignalQueue() as signals:
        ours = fork_ranks(nproc, folder)
        if isinstance(ours, Child):
            world = local_world(ours.rank, nproc, folder=folder, port=port)
            leave(play(lambda: _become(main, world), rank=ours.rank, pipe=ours.pipe))
        return settle(ours, signals, folder=folder, telling=telling)


def join(main: Main, world: World, *, mesh: Mesh | None = None, out: Path | None = None) -> int:
    """Call `main(world)` in this process, which is one rank of a world that is there already; 0 when it is through.

    torchrun and Slurm end all ranks when one ends. So a rank that only sees the echo of another's failure, or an error
    that rank 0 sees too, waits a moment to be ended before it speaks.

    Raises:
        RankError: what went wrong, with this rank's coordinates.
    """
    prepare_rank(world.local_size)
    try:
        main(world)
    except Exception as error:
        failure = describe(error, rank=world.rank, at_s=time.monotonic())
        if failure.kind == "echo" or (failure.kind == "user" and world.rank > 0):
            time.sleep(PATIENCE_S)
        raise Telling(mesh, out).error(failure) from error
    return EXIT_OK


def local_world(rank: int, size: int, *, folder: Path, port: int | None) -> World:
    """The world of one forked rank."""
    meeting = f"file://{folder}/meet" if port is None else f"tcp://{LOCALHOST}:{port}"
    return World(rank, size, rank, size, meeting)


def settle(crew: Crew, signals: SignalQueue, *, folder: Path, telling: Telling) -> int:
    """Wait for the forked ranks, clean up after them, and say how they ended; see `launch`."""
    try:
        crew.wait(signals)
    finally:
        crew.end(signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
    if crew.failures:
        raise telling.error(first_of(crew.failures))
    return crew.exit_code()


def _become(main: Main, world: World) -> None:
    prepare_rank(world.local_size)
    main(world)
