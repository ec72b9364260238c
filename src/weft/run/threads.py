"""Owns ranks as threads of this process: several devices in one process, and runs that a debugger can enter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.comm.threads import ThreadWorld
from weft.errors import EXIT_OK
from weft.run.failure import Failure, describe
from weft.run.rank_setup import prepare_rank
from weft.run.world import ThreadRendezvous, World

WAIT_S = 600.0
"""How long a rank waits for another one in an operation."""
GRACE_S = 5.0


@dataclass(frozen=True)
class Ended:
    """How ranks ended: what went wrong, in order, and the exit code that they left with."""

    failures: tuple[Failure, ...]
    code: int


def play_threads(main: Callable[[World], None], devices: Sequence[torch.device]) -> Ended:
    """Call `main` on one thread for each device.

    After a failure or Ctrl-C every rank ends where it next meets another one. Those that have not come there within a
    moment are left behind, and Python waits for them at its exit: a thread that is cut off inside torch aborts the process.
    """
    world = ThreadWorld(len(devices), devices=devices, timeout_s=WAIT_S)
    failures: list[Failure] = []
    codes: list[int] = []

    def act(rank: int) -> None:
        prepare_rank(world.size)
        try:
            main(World(rank, world.size, rank, world.size, ThreadRendezvous(world)))
        except SystemExit as leaving:
            codes.append(leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None))
            world.leave(rank)
        except BaseException as error:  # noqa: BLE001 - it goes on in the thread that waits
            failures.append(describe(error, rank=rank, at_s=time.monotonic()))
            world.fail(rank, error)
        else:
            world.leave(rank)

    threads = [threading.Thread(target=act, args=(rank,), name=f"rank {rank}") for rank in range(world.size)]
    for thread in threads:
        thread.start()
    try:
        _join(threads, failures)
    except BaseException as interrupt:
        world.fail(-1, interrupt)
        _join(threads, [*failures, interrupt])
        raise
    return Ended(tuple(failures), max(codes, default=EXIT_OK))


def _join(threads: Sequence[threading.Thread], failures: Sequence[object]) -> None:
    """Wait for all threads, and a moment only once something has failed."""
    deadline = float("inf")
    while any(thread.is_alive() for thread in threads) and time.monotonic() < deadline:
        if failures:
            deadline = min(deadline, time.monotonic() + GRACE_S)
        next(thread for thread in threads if thread.is_alive()).join(0.05)
