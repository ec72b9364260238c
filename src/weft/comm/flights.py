"""Owns operations that a torch.distributed backend has under way: waiting in slices, and knowing when they are done."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

GLANCE_S = 0.001
"""How long a first look at a message waits for the one who looks after it."""


class BackendWork(Protocol):
    """What a backend hands out; it raises RuntimeError when it fails and when `wait` takes too long."""

    def wait(self, timeout: timedelta = ...) -> bool: ...
    def is_completed(self) -> bool: ...


class Flight(Protocol):
    """One call under way on a backend."""

    def wait(self, timeout_s: float) -> bool:
        """Block for at most `timeout_s`; whether it is done. Raises RuntimeError when it failed."""
        ...

    def is_completed(self) -> bool: ...


@dataclass
class Collective:
    """Works of one collective, and what is left to do locally once they are done (once, by the first who waits)."""

    works: Sequence[BackendWork]
    finish: Callable[[], object] | None = None

    def wait(self, timeout_s: float) -> bool:
        """In slices: a wait that runs out leaves the group usable."""
        if not all(_landed(work, timeout_s) for work in self.works):
            return False
        if self.finish is not None:
            self.finish()
            self.finish = None
        return True

    def is_completed(self) -> bool:
        """As the backend says."""
        return all(work.is_completed() for work in self.works)


@dataclass
class Streamed:
    """Works on an accelerator: waiting orders the caller's stream behind them and does not stop the caller.

    The backend itself keeps the time-out there: a wait with one would stop the caller until the device is done.
    """

    works: Sequence[BackendWork]
    finish: Callable[[], object] | None = None

    def wait(self, timeout_s: float) -> bool:
        """At once, as far as the caller is concerned."""
        for work in self.works:
            work.wait()
        if self.finish is not None:
            self.finish()
            self.finish = None
        return True

    def is_completed(self) -> bool:
        """Whether the device is done."""
        return all(work.is_completed() for work in self.works)


# Note [Messages on gloo]
# A send or receive of gloo is not done before somebody waits for it (`is_completed` stays False), and a wait that runs
# out closes every connection of its group. So a message is waited for once, for as long as the group allows; whoever
# only wants to look has a thread wait in their place. The handle must live until then, or the message is lost.


@dataclass
class Message:
    """Sends and receives that belong together: see Note [Messages on gloo]."""

    works: Sequence[BackendWork]
    finish: Callable[[], object] | None = None
    limit_s: float = 3600.0
    _watch: Watch | None = field(default=None, init=False)

    def wait(self, timeout_s: float) -> bool:
        """All the way; there is no second try."""
        if self._watch is not None and not self._watch.result(timeout_s):
            return False
        if self._watch is None:
            self._wait_for_all(timeout_s)
        if self.finish is not None:
            self.finish()
            self.finish = None
        return True

    def is_completed(self) -> bool:
        """True to fact, with the help of a thread that waits."""
        if self._watch is None:
            self._watch = Watch(lambda: self._wait_for_all(self.limit_s))
        return self._watch.done.wait(GLANCE_S)

    def _wait_for_all(self, timeout_s: float) -> None:
        for work in self.works:
            work.wait(timedelta(seconds=timeout_s))


class Watch:
    """A thread that waits in somebody's place and keeps what it saw."""

    def __init__(self, wait: Callable[[], object]) -> None:
        self.done = threading.Event()
        self._error: RuntimeError | None = None
        self._wait = wait
        threading.Thread(target=self._run, name="weft message", daemon=True).start()

    def result(self, timeout_s: float) -> bool:
        """Whether it ended well within `timeout_s`; raises what it ended with otherwise."""
        ended = self.done.wait(timeout_s)
        if self._error is not None:
            raise self._error
        return ended

    def _run(self) -> None:
        try:
            self._wait()
        except RuntimeError as error:
            self._error = error
        finally:
            self.done.set()


@dataclass(frozen=True)
class Nothing:
    """A call that moves no bytes."""

    def wait(self, timeout_s: float) -> bool:
        """At once."""
        return True

    def is_completed(self) -> bool:
        """Always."""
        return True


def _landed(work: BackendWork, timeout_s: float) -> bool:
    try:
        return work.wait(timedelta(seconds=timeout_s))
    except RuntimeError:
        if not work.is_completed():
            return False  # only this wait ran out
    return work.wait(timedelta(seconds=timeout_s))  # it failed, or it came since then: this says which
