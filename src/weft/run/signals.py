"""Owns signals: those that reach the process which started the ranks, and those that ask a rank to save and leave."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Signals:
    """Signals that arrive while it is open are noted, for whoever asks next, instead of ending this process.

    What the shell has this process ignore (a script's background job: Ctrl-C) stays ignored.
    """

    NOTED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGTSTP)

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


class Leave:
    """Whether this process has been asked to save and leave, while it is open: by SIGTERM, or by SIGUSR1, which batch
    systems send some time ahead of the end.

    Python lets only the main thread listen; opened in another one, it hears nothing by itself.
    """

    HEARD = (signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Leave:
        if _is_main():
            self._before = {number: signal.signal(number, self._note) for number in self.HEARD}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if _is_main():
            for number, handler in self._before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]  # what signal() gave

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


def _is_main() -> bool:
    return threading.current_thread() is threading.main_thread()
