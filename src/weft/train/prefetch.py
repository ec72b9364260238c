"""Owns reading ahead: what the next steps need is read and moved by a thread of its own while this step trains."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")
POLL_S = 0.05
"""How often a reader that waits for room looks whether it is still wanted."""


@contextmanager
def ahead(read: Callable[[int], T], steps: Iterable[int], *, most: int) -> Iterator[Iterator[T]]:
    """`read(step)` for step after step, in order; at most `most` of them wait to be taken, 0 reads as they are asked for.

        with ahead(feed.batches, range(100), most=2) as batches:
            for batch in batches: ...

    What goes wrong in the thread is raised where its result would have been taken. On leaving, the thread has ended.
    """
    if not most:
        yield map(read, steps)
        return
    reader = _Reader(read, steps, most=most)
    reader.thread.start()
    try:
        yield reader.results()
    finally:
        reader.stop()


class _Reader(Generic[T]):
    def __init__(self, read: Callable[[int], T], steps: Iterable[int], *, most: int) -> None:
        self._read, self._steps = read, steps
        self._done: queue.Queue[tuple[T] | BaseException | None] = queue.Queue(maxsize=most)
        self._unwanted = threading.Event()
        self.thread = threading.Thread(target=self._run, name="prefetch", daemon=True)

    def _run(self) -> None:
        try:
            for step in self._steps:
                if not self._put((self._read(step),)):
                    return
            self._put(None)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that trains
            self._put(error)

    def _put(self, item: tuple[T] | BaseException | None) -> bool:
        """Hand over when there is room; whether anybody wants more."""
        while not self._unwanted.is_set():
            try:
                self._done.put(item, timeout=POLL_S)
                return True
            except queue.Full:
                continue
        return False

    def results(self) -> Iterator[T]:
        while (item := self._done.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item[0]

    def stop(self) -> None:
        self._unwanted.set()
        self.thread.join()
