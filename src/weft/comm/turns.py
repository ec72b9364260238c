"""Turns of rank threads: one rank computes at a time, until it waits for other ranks.

Note [Turns]
    A rank of a small model computes in Python, and every torch operation releases the lock of the
    interpreter and takes it again. Where other threads are ready, each of these hands the lock to
    another core: 32 ranks on two idle cores spent more system time on that than they computed. In
    turns nothing else is ready, and the lock stays where it is.

    Nothing relies on turns. Who holds one may wait for something that is no collective (a thread of
    its own, a file), so a rank that has waited PATIENCE_S for a turn goes on without one; and a rank
    that polls has none until it joins its next collective.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE_S = 20.0


class Turn:
    """One rank's turn, taken and released by the thread of that rank.

    Args:
        lock: of all ranks of a world; None: ranks compute at the same time.
    """

    __slots__ = ("_is_held", "_lock")

    def __init__(self, lock: threading.Lock | None) -> None:
        self._lock = lock
        self._is_held = False

    def take(self) -> None:
        """Wait for the turn, if this rank has none; at most PATIENCE_S."""
        if self._lock is not None and not self._is_held:
            self._is_held = self._lock.acquire(timeout=PATIENCE_S)

    def release(self) -> None:
        """Let another rank compute."""
        if self._lock is not None and self._is_held:
            self._is_held = False
            self._lock.release()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Compute in turns inside the block."""
        self.take()
        try:
            yield
        finally:
            self.release()
