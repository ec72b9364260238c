"""Owns ranks played by threads of this process."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

import torch

from weft.comm.comm import Comm
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.errors import CommTimeout

T = TypeVar("T")

COMM_SHARE = 0.8
"""Part of a run's time-out that one operation may wait: it can then name who is missing before the run is stopped."""


def run_in_threads(mesh: Mesh, fn: Callable[[Comm], T], *, timeout_s: float) -> list[T]:
    """See `run_ranks`."""
    crew = _Crew(mesh, fn, ThreadWorld(mesh.size, timeout_s=COMM_SHARE * timeout_s))
    threads = [
        threading.Thread(target=crew.play, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(mesh.size)
    ]
    deadline = time.monotonic() + timeout_s
    with _one_intra_op_thread():
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
            late = {rank: thread for rank, thread in enumerate(threads) if thread.is_alive()}
        except BaseException as interrupt:
            crew.world.fail(-1, interrupt)
            raise
    if crew.failures:
        raise crew.failures[0]
    if late:
        raise _too_late(crew, late, timeout_s)
    return [crew.results[rank] for rank in range(mesh.size)]


class _Crew(Generic[T]):
    """What the threads share: the world, results by rank, failures in the order in which they happened."""

    def __init__(self, mesh: Mesh, fn: Callable[[Comm], T], world: ThreadWorld) -> None:
        self.mesh, self.fn, self.world = mesh, fn, world
        self.results: dict[int, T] = {}
        self.failures: list[BaseException] = []

    def play(self, rank: int) -> None:
        """Be `rank`."""
        torch.set_flush_denormal(True)
        try:
            self.results[rank] = self.fn(Comm(self.mesh, rank, self.world.transport(rank)))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that called run_ranks
            error.add_note(f"raised by rank {rank} ({self.mesh.coord_text(rank)}) of mesh {self.mesh}")
            self.failures.append(error)
            self.world.fail(rank, error)
        else:
            self.world.leave(rank)


@contextmanager
def _one_intra_op_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # threads that start from here on take it over
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _too_late(crew: _Crew[T], late: dict[int, threading.Thread], timeout_s: float) -> CommTimeout:
    names = ", ".join(f"{rank} ({crew.mesh.coord_text(rank)})" for rank in late)
    error = CommTimeout(f"rank {names} of mesh {crew.mesh} did not finish within {timeout_s:g} s")
    frames = sys._current_frames()
    for rank, thread in late.items():
        frame = frames.get(thread.ident or -1)
        error.add_note(f"rank {rank} is at:\n" + "".join(traceback.format_stack(frame)))
    crew.world.fail(min(late), error)
    return error
