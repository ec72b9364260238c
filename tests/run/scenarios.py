"""Program of test_launch.py: `python scenarios.py FOLDER NAME ...` launches scenarios and prints the outcome of each.

A scenario is the function of one rank. Every rank records its process id (and those it starts) in
FOLDER.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import psutil
import torch

from weft.core.mesh import Mesh
from weft.errors import CommTimeout, DataError, Fault, RankError
from weft.run import worker_group
from weft.run.launch import Supervision, join, launch
from weft.run.rank_setup import open_comm
from weft.run.worker import OrderlyEnd
from weft.run.world import World, detect

MESH = Mesh.parse("pp3")
FOLDER = Path(sys.argv[1])
FOREVER_S = 300
SETTLE_S = worker_group.SETTLE_S
PATIENT_S = 60.0

Scenario = Callable[[World], None]


def record(name: str, pid: int) -> None:
    """Leave a file `NAME.PID` in the folder."""
    (FOLDER / f"{name}.{pid}").touch()


def ok(world: World) -> None:
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        total = comm.all_reduce(torch.tensor([float(world.rank)]), "pp")
    assert total.item() == 3.0, total
    record(f"ok{world.rank}", os.getpid())


def listens(world: World) -> None:
    """The sockets on which the rank listens are recorded while it is connected."""
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        comm.barrier("pp")
        sockets = psutil.Process().net_connections(kind="inet")
        listening = [each.laddr for each in sockets if each.status == psutil.CONN_LISTEN]
        text = json.dumps([[address.ip, address.port] for address in listening])
        (FOLDER / f"listens{world.rank}.json").write_text(text)
        comm.barrier("pp")


def prepared(world: World) -> None:
    """One intra-op thread, flushed denormals, an empty stdin, a process group of its own."""
    assert torch.get_num_threads() == 1
    assert torch.tensor([1e-40]).mul(1.0).item() == 0.0, "denormals are flushed"
    assert sys.stdin.read() == ""
    assert os.getpgid(0) == os.getpid()


def raises(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank 1 cannot go on")
    time.sleep(FOREVER_S)


def reports_early(world: World) -> None:
    """Rank 1 reports its error before it closes what it has opened, which takes long."""
    if world.rank == 1:
        try:
            raise ValueError("rank 1 cannot go on")
        except ValueError as error:
            assert world.attempt is not None
            world.attempt.report_error(error)
            time.sleep(FOREVER_S)
    time.sleep(FOREVER_S)


def raises_during_collectives(world: World) -> None:
    """The others wait for rank 1 in a collective and fail secondarily."""
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        comm.barrier("pp")
        if world.rank == 1:
            raise ValueError("rank 1 cannot go on")
        comm.all_reduce(torch.ones(4), "pp")


def killed_during_collectives(world: World) -> None:
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        comm.barrier("pp")
        if world.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.all_reduce(torch.ones(4), "pp")


def all_raise(world: World) -> None:
    """Rank 2 first, then rank 1, then rank 0."""
    while world.rank < 2 and not list(FOLDER.glob(f"raises{world.rank + 1}.*")):
        time.sleep(0.001)
    if world.rank < 2:
        time.sleep(0.2)
    record(f"raises{world.rank}", os.getpid())
    raise DataError(Fault("data.source", f"empty on rank {world.rank}"))


def secondary_failure_before_cause(world: World) -> None:
    """Rank 0 sees a closed connection before rank 2 raises the cause."""
    if world.rank == 2:
        record("fails-soon", os.getpid())
        time.sleep(0.05)
        raise ValueError("rank 2 cannot go on")
    while world.rank == 1 or not list(FOLDER.glob("fails-soon.*")):
        time.sleep(0.001)
    raise ConnectionResetError("connection closed by peer")


def secondary_failure_only(world: World) -> None:
    """No rank raises a cause; the others ignore SIGTERM, and being killed is no cause either."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if world.rank == 1:
        raise CommTimeout("rank 2 did not come")
    while True:
        time.sleep(1)


def crashes(world: World) -> None:
    if world.rank == 0:
        ctypes.string_at(0)
    time.sleep(FOREVER_S)


def ignores_sigterm(world: World) -> None:
    """SIGTERM is ignored, and the rank has started a process."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    record("grandchild", subprocess.Popen(["sleep", str(FOREVER_S)]).pid)
    if world.rank == 1:
        raise ValueError("rank 1 cannot go on")
    while True:
        time.sleep(1)


def leaves_a_process(world: World) -> None:
    record("grandchild", subprocess.Popen(["sleep", str(FOREVER_S)]).pid)


def exits_without_report(world: World) -> None:
    if world.rank == 2:
        os._exit(0)


def exits_by_python(world: World) -> None:
    """As user code may; ranks that wait for this one are not the cause."""
    with open_comm(world, MESH, torch.device("cpu")) as comm:
        if world.rank == 1:
            sys.exit(0)
        comm.barrier("pp")


def loses_its_folder(world: World) -> None:
    """At the first start something removes the launcher's temporary folder, and a rank fails."""
    assert world.attempt is not None
    if world.attempt.restart is None and world.rank == 1:
        store = Path(str(world.rendezvous).removeprefix("file://"))
        shutil.rmtree(store.parents[1])
        raise ValueError("rank 1 cannot go on")
    ok(world)


def saved(world: World) -> None:
    raise OrderlyEnd(75)


def waits(world: World) -> None:
    """Until a signal arrives."""
    record("waiting", os.getpid())
    time.sleep(FOREVER_S)


def waits_ignoring_signals(world: World) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    waits(world)


def _end_saved(number: int, frame: FrameType | None) -> NoReturn:
    raise OrderlyEnd(75)


def saves_on_sigterm(world: World) -> None:
    signal.signal(signal.SIGTERM, _end_saved)
    waits(world)


SCENARIOS: dict[str, Scenario] = {
    "ok": ok,
    "listens": listens,
    "prepared": prepared,
    "raises": raises,
    "reports_early": reports_early,
    "raises_during_collectives": raises_during_collectives,
    "killed_during_collectives": killed_during_collectives,
    "all_raise": all_raise,
    "secondary_failure_before_cause": secondary_failure_before_cause,
    "secondary_failure_only": secondary_failure_only,
    "crashes": crashes,
    "ignores_sigterm": ignores_sigterm,
    "leaves_a_process": leaves_a_process,
    "exits_without_report": exits_without_report,
    "exits_by_python": exits_by_python,
    "loses_its_folder": loses_its_folder,
    "saved": saved,
    "waits": waits,
    "waits_ignoring_signals": waits_ignoring_signals,
    "saves_on_sigterm": saves_on_sigterm,
}


@dataclass
class Outcome:
    """How a launch ended."""

    name: str
    code: int | None = None
    error: str | None = None
    kind: str | None = None
    seconds: float = 0.0
    num_threads: int = 0


def run_scenario(text: str) -> Outcome:
    """Launch one scenario on three ranks: `ok`, or `ok:threads`, `ok:4711` (a port), or
    `ok:patient`: reports of the others are waited for very long.
    """
    name, _, option = text.partition(":")
    options: dict[str, Any] = {}
    worker_group.SETTLE_S = PATIENT_S if option == "patient" else SETTLE_S
    if option == "threads":
        options["transport"] = option
    elif option == "restarts":
        options["supervision"] = Supervision(restarts=1, snapshots=True)
    elif option == "patient":
        pass
    elif option:
        options["port"] = int(option)

    def run_rank(world: World) -> None:
        record(name, os.getpid())
        SCENARIOS[name](world)

    outcome = Outcome(text)
    start = time.monotonic()
    try:
        outcome.code = launch(run_rank, 3, mesh=MESH, out=FOLDER, **options)
    except RankError as error:
        outcome.error = str(error)
        outcome.kind = error.kind
    outcome.seconds = time.monotonic() - start
    outcome.num_threads = len(os.listdir("/proc/self/task"))
    return outcome


def main() -> None:
    world = detect(os.environ)
    if world is not None:
        try:
            sys.exit(join(SCENARIOS[sys.argv[2]], world, mesh=MESH))
        except RankError as error:
            sys.exit(f"error: {error}")
    for text in sys.argv[2:]:
        sys.stdout.write(json.dumps(asdict(run_scenario(text))) + "\n")


if __name__ == "__main__":
    main()
