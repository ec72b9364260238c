"""Signal handling: signals to the process that launched the ranks, and requests to a rank to save and stop."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class SignalQueue:
    """While open, signals are queued instead of ending this process.

    Signals that the shell has set to be ignored (Ctrl-C for a background job of a script) stay
    ignored. After KeyboardInterrupt this process ends: further Ctrl-C is ignored, so that it does
    not leave the records of the run and temporary folders unfinished.
    """

    SIGNALS = (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
        signal.SIGUSR1,
        signal.SIGQUIT,
        signal.SIGTSTP,
    )

    def __init__(self) -> None:
        self.pending: list[int] = []
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalQueue:
        for number in self.SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._enqueue)
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._previous[signal.SIGINT] = signal.SIG_IGN
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _enqueue(self, number: int, frame: FrameType | None) -> None:
        # nothing else here: the handler may interrupt any line of the main thread
        self.pending.append(number)

    def next(self) -> int | None:
        """Remove and return the oldest queued signal; None if there is none."""
        return self.pending.pop(0) if self.pending else None


class StopRequest:
    """Whether this process was asked to save and stop, while open: by SIGTERM, by SIGHUP (its
    terminal was closed; ignored under nohup), or by SIGUSR1, which batch systems send some time
    before the end of a job.

    Python delivers signals to the main thread only: opened in another thread, it changes no
    handler.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in self.SIGNALS:
                is_ignored = signal.getsignal(number) == signal.SIG_IGN
                if number != signal.SIGHUP or not is_ignored:
                    self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._previous.items():
                signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
