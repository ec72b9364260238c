"""Owns the signals that reach the process which started the ranks."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Signals:
    """Signals that arrive while it is open are noted, for whoever asks next, instead of ending this process.

    What the shell has this process ignore (a script's background job: Ctrl-C) stays ignored.
    """

    NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGTSTP)

    def __init__(self) -> None:
        self.pending: list[int] = []

    def __enter__(self) -> Signals:
        heeded = (number for number in self.NOTED if signal.getsignal(number) != signal.SIG_IGN)
        self._before = {number: signal.signal(number, self._note) for number in heeded}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.pending.append(number)

    def next(self) -> int | None:
        """The oldest signal that nobody has asked for."""
        return self.pending.pop(0) if self.pending else None
