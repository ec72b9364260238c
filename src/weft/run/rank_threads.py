"""Ranks as threads of this process: run a function on each, collect results, errors, hung ranks and the stacks of late ones."""

from __future__ import annotations

import atexit
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, RankError
from weft.run.failure import RankFailure, describe_error
from weft.run.hang_watch import HangWatch
from weft.run.process_state import ProcessState, thread_state
from weft.run.rank_random import own_generator
from weft.run.rank_status import StatusBoard
from weft.run.worker import exit_now

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


class ThreadWatch:
    """Looks for hung rank threads, by the rule for processes.

    Args:
        board: one slot a rank, which the ranks write.
        timeout_s: see `weft.run.hang.HangDetector`.
    """

    def __init__(self, board: StatusBoard, mesh: Mesh | None, *, timeout_s: float) -> None:
        self._watch = HangWatch(board, mesh=mesh, timeout_s=timeout_s)

    def find_failure(self, running: Mapping[int, threading.Thread]) -> RankFailure | None:
        """The hung rank among the running ones, with its stack; None if there is none."""

        def state_of(rank: int) -> ProcessState:
            native_id = running[rank].native_id
            return ProcessState() if native_id is None else thread_state(native_id)

        hang = self._watch.check(running, state_of)
        if hang is None:
            return None
        culprit = running.get(hang.ranks[0])
        stack = "" if culprit is None else _stack_of(culprit)
        return self._watch.failure_of(hang, stack=stack, at_s=time.monotonic())

    def with_place(self, failure: RankFailure) -> RankFailure:
        """The failure with the step and phase of its rank."""
        return self._watch.with_place(failure)


def run_rank_threads(
    fn: Callable[[int], T],
    world: ThreadWorld,
    *,
    timeout_s: float = float("inf"),
    watch: ThreadWatch | None = None,
) -> ThreadRun[T]:
    """Call `fn(rank)` on one thread for each rank of `world`, and wait for them.

    Every rank draws from a generator of its own, which starts in the state of the caller's: see Note
    [Generators of rank threads] in run/rank_random.py.

    After a failure, a hang or Ctrl-C every other rank ends at its next collective. A rank that
    reaches none within GRACE_S is abandoned: its thread ends with the process at the latest.

    Args:
        timeout_s: for the whole run.
        watch: looks for hung ranks; None: nothing does.
    """
    run: ThreadRun[T] = ThreadRun()
    # taken once, before any rank draws: all start in the same state
    random_state = torch.get_rng_state()

    def run_rank(rank: int) -> None:
        try:
            with (
                world.turns[rank].taken(),
                torch.autograd.set_multithreading_enabled(False),  # Note [Backward in rank threads]
                own_generator(random_state),
            ):
                run.results[rank] = fn(rank)
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            run.errors[rank] = error
            failure = describe_error(error, rank=rank, at_s=time.monotonic())
            run.failures.append(failure if watch is None else watch.with_place(failure))
            world.fail(rank, error)
        else:
            world.leave(rank)

    threads: dict[int, threading.Thread] = {}
    for rank in range(world.size):
        threads[rank] = threading.Thread(
            target=run_rank, args=(rank,), name=f"rank {rank}", daemon=True
        )
    for thread in threads.values():
        thread.start()

    awaited = dict(threads)

    def find_failure(running: Mapping[int, threading.Thread]) -> bool:
        """Whether a rank has failed, or hangs: then the others are ended, and it is left."""
        if watch is not None and not run.failures:
            hung = watch.find_failure(running)
            if hung is not None:
                run.failures.append(hung)
                # a hung thread cannot be ended: the others are waited for, and it is left behind
                awaited.pop(hung.rank, None)
                # the others raise at their next collective, with its name
                world.fail(hung.rank, RankError(hung.rank, "hung", hung.text))
        return bool(run.failures)

    try:
        _join(awaited, timeout_s=timeout_s, find_failure=find_failure)
    except BaseException as interrupt:
        world.fail(-1, interrupt)
        _join(awaited, timeout_s=GRACE_S, find_failure=lambda _: True)
        raise
    for rank, thread in _alive(threads).items():
        run.stacks[rank] = _stack_of(thread)
    return run


def _join(
    threads: Mapping[int, threading.Thread],
    *,
    timeout_s: float,
    find_failure: Callable[[Mapping[int, threading.Thread]], bool],
) -> None:
    """Wait until all threads have ended, the time is up, or GRACE_S after a failure."""
    deadline = time.monotonic() + timeout_s
    saw_failure = False
    while running := _alive(threads):
        if not saw_failure and find_failure(running):
            saw_failure = True
            deadline = min(deadline, time.monotonic() + GRACE_S)
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        first = next(iter(running.values()))
        # in slices, so that Ctrl-C is seen
        first.join(min(POLL_S, left_s))


def _alive(threads: Mapping[int, threading.Thread]) -> dict[int, threading.Thread]:
    return {rank: thread for rank, thread in threads.items() if thread.is_alive()}


def _stack_of(thread: threading.Thread) -> str:
    """The stack of a thread, the innermost call first."""
    frame = sys._current_frames().get(thread.ident or -1)
    lines = traceback.format_stack(frame)
    lines.reverse()
    return f"Thread {thread.name} (most recent call first):\n{''.join(lines)}"


def end_without_stuck_threads() -> None:
    """At the exit of Python, end with EXIT_FAILED if a rank thread still runs then: what it computes
    outside of Python would be torn down under it.
    """
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]
    atexit.register(_exit_if_alive, threads)


def _exit_if_alive(threads: list[threading.Thread]) -> None:
    if any(thread.is_alive() for thread in threads):
        exit_now(EXIT_FAILED)
