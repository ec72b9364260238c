"""A note on stderr about a wait that takes unusually long, while it goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

NOTE_AFTER_S = 10.0


@contextmanager
def late_note(text: Callable[[], str]) -> Iterator[None]:
    """While the block runs for longer than NOTE_AFTER_S, say once what it waits for.

    Args:
        text: called then, in another thread.
    """
    timer = threading.Timer(NOTE_AFTER_S, _print_note, [text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _print_note(text: Callable[[], str]) -> None:
    with suppress(OSError, RuntimeError):  # stderr is closed, or the store is lost
        sys.stderr.write(f"note: {text()}\n")
        sys.stderr.flush()
