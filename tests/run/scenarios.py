"""A program for test_launch.py: `python scenarios.py FOLDER NAME ...` plays scenarios and prints what became of each.

A scenario is what one rank does. Every rank leaves its process id (and those it starts) in FOLDER.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from weft.core.mesh import Mesh
from weft.errors import CommTimeout, DataError, Fault, RankError
from weft.run.launch import join, launch
from weft.run.rank_setup import open_comm
from weft.run.world import World, detect

MESH = Mesh.parse("pp3")
FOLDER = Path(sys.argv[1])
FOREVER_S = 300


def mark(name: str, pid: int) -> None:
    (FOLDER / f"{name}.{pid}").touch()


def ok(world: World) -> None:
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        total = comm.all_reduce(torch.tensor([float(world.rank)]), "pp")
    assert total.item() == 3.0, total
    mark(f"ok{world.rank}", os.getpid())


def prepared(world: World) -> None:
    """Threads, denormals, no keyboard, a process group of its own."""
    assert torch.get_num_threads() == 1
    assert torch.tensor([1e-40]).mul(1.0).item() == 0.0, "denormals are flushed"
    assert sys.stdin.read() == ""
    assert os.getpgid(0) == os.getpid()


def raises(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank 1 cannot go on")
    time.sleep(FOREVER_S)


def raises_amid_talk(world: World) -> None:
    """The others wait for rank 1 in an operation; what they see is an echo."""
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        comm.barrier("pp")
        if world.rank == 1:
            raise ValueError("rank 1 cannot go on")
        comm.all_reduce(torch.ones(4), "pp")


def killed_amid_talk(world: World) -> None:
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        comm.barrier("pp")
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(torch.ones(4), "pp")


def all_raise(world: World) -> None:
    time.sleep(0.05 * (3 - world.rank))
    raise DataError(Fault("data.source", f"empty as rank {world.rank} sees it"))


def echo_before_cause(world: World) -> None:
    """Rank 0 sees a closed connection before rank 2 comes to say why."""
    if world.rank == 2:
        mark("fails-soon", os.getpid())
        time.sleep(0.05)
        raise ValueError("rank 2 cannot go on")
    while world.rank == 1 or not list(FOLDER.glob("fails-soon.*")):
        time.sleep(0.001)
    raise ConnectionResetError("connection closed by peer")


def echo_alone(world: World) -> None:
    """Nobody says why, and the others have to be killed: that is no cause."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank == 1:
        raise CommTimeout("rank 2 did not come")
    while True:
        time.sleep(1)


def crashes(world: World) -> None:
    if world.rank == 0:
        ctypes.string_at(0)
    time.sleep(FOREVER_S)


def refuses_to_end(world: World) -> None:
    """SIGTERM is not enough, and there is a grandchild."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    mark("grandchild", subprocess.Popen(["sleep", str(FOREVER_S)]).pid)
    if world.rank == 1:
        raise ValueError("rank 1 cannot go on")
    while True:
        time.sleep(1)


def leaves_things_behind(world: World) -> None:
    mark("grandchild", subprocess.Popen(["sleep", str(FOREVER_S)]).pid)


def says_nothing(world: World) -> None:
    if world.rank == 2:
        sys.exit(3)


def saved(world: World) -> None:
    sys.exit(75)


def waits(world: World) -> None:
    """Until a signal comes."""
    mark("waiting", os.getpid())
    time.sleep(FOREVER_S)


def waits_stubbornly(world: World) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    waits(world)


def saves_on_sigterm(world: World) -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    waits(world)


SCENARIOS: dict[str, Callable[[World], None]] = {
    act.__name__: act
    for act in (
        ok,
        prepared,
        raises,
        raises_amid_talk,
        killed_amid_talk,
        all_raise,
        echo_before_cause,
        echo_alone,
        crashes,
        refuses_to_end,
        leaves_things_behind,
        says_nothing,
        saved,
        waits,
        waits_stubbornly,
        saves_on_sigterm,
    )
}


def play(name: str) -> dict[str, object]:
    """One scenario on three ranks: `ok`, or `ok:threads`, `ok:4711` (a port)."""
    name, _, how = name.partition(":")

    def act(world: World) -> None:
        mark(name, os.getpid())
        SCENARIOS[name](world)

    start = time.monotonic()
    told = {"code": None, "error": None, "kind": None}
    try:
        options = {"transport": how} if how == "threads" else {"port": int(how)} if how else {}
        told["code"] = launch(act, 3, mesh=MESH, out=FOLDER, **options)
    except RankError as error:
        told |= {"error": str(error), "kind": error.kind}
    return {**told, "seconds": time.monotonic() - start, "threads": len(os.listdir("/proc/self/task"))}


if __name__ == "__main__":
    if (world := detect(os.environ)) is not None:
        try:
            sys.exit(join(SCENARIOS[sys.argv[2]], world, mesh=MESH))
        except RankError as error:
            sys.exit(f"error: {error}")
    for name in sys.argv[2:]:
        sys.stdout.write(json.dumps({"name": name, **play(name)}) + "\n")
