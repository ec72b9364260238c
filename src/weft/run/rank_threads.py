"""Ranks as threads of this process: run a function on each, collect results, errors, and the stacks of late ranks."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from weft.comm.threads import ThreadWorld
from weft.run.failure import RankFailure, describe_error

T = TypeVar("T")

GRACE_S = 5.0
"""After a failure, time for the other ranks to reach a collective, where they end."""
POLL_S = 0.05


@dataclass
class ThreadRun(Generic[T]):
    """What the rank threads returned or raised, by rank.

    Attributes:
        failures: in order of occurrence.
        stacks: of the ranks that did not finish in time.
    """

    results: dict[int, T] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    stacks: dict[int, str] = field(default_factory=dict)


def run_rank_threads(
    fn: Callable[[int], T],
    world: ThreadWorld,
    *,
    daemon: bool,
    timeout_s: float = float("inf"),
) -> ThreadRun[T]:
    """Call `fn(rank)` on one thread for each rank of `world`, and wait for them.

    After a failure or Ctrl-C every other rank ends at its next collective. A rank that reaches none
    within GRACE_S is abandoned.

    Args:
        daemon: whether the exit of Python ends abandoned ranks (which may abort the process while
            torch computes) instead of waiting for them.
        timeout_s: for the whole run.
    """
    run: ThreadRun[T] = ThreadRun()

    def run_rank(rank: int) -> None:
        try:
            with (
                world.turns[rank].taken(),
                torch.autograd.set_multithreading_enabled(False),
            ):  # Note [Backward in rank threads]
                run.results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            run.errors[rank] = error
            run.failures.append(describe_error(error, rank=rank, at_s=time.monotonic()))
            world.fail(rank, error)
        else:
            world.leave(rank)

    threads: list[threading.Thread] = []
    for rank in range(world.size):
        threads.append(
            threading.Thread(target=run_rank, args=(rank,), name=f"rank {rank}", daemon=daemon)
        )
    for thread in threads:
        thread.start()
    try:
        _join(threads, timeout_s=timeout_s, has_failed=lambda: bool(run.failures))
    except BaseException as interrupt:
        world.fail(-1, interrupt)
        _join(threads, timeout_s=GRACE_S, has_failed=lambda: True)
        raise
    for rank, thread in enumerate(threads):
        if thread.is_alive():
            run.stacks[rank] = _stack_of(thread)
    return run


def _join(
    threads: Sequence[threading.Thread], *, timeout_s: float, has_failed: Callable[[], bool]
) -> None:
    """Wait until all threads have ended, the time is up, or GRACE_S after a failure."""
    deadline = time.monotonic() + timeout_s
    saw_failure = False
    for thread in threads:
        while thread.is_alive():
            left_s = deadline - time.monotonic()
            if has_failed() and not saw_failure:
                saw_failure = True
                left_s = min(left_s, GRACE_S)
                deadline = time.monotonic() + left_s
            if left_s <= 0:
                return
            thread.join(min(POLL_S, left_s))


def _stack_of(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or -1)
    return "".join(traceback.format_stack(frame))
