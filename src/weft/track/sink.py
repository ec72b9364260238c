"""A view that passes events to a tracker in a thread of its own: a tracker that fails or waits never stops the training."""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Callable, Sequence

from weft.config.schema import TrackerName
from weft.errors import type_and_message
from weft.track.series import Event, numbers_of, text_of
from weft.track.tracker import TrackedRun, Tracker, open_tracker

MAX_PENDING = 10_000
"""Events that a slow tracker may be behind; then it is left."""
CLOSE_S = 30.0
"""How long the end of a run waits for a tracker."""


class TrackerSink:
    """Passes the events of a run to one tracker.

    The tracker is opened by the first event that has numbers or a text, and opened again after
    steps were taken back, so that it replaces what it holds of them. Everything that it raises ends
    it with one warning.

    Args:
        warn: shows a line; default: standard error.
    """

    def __init__(
        self, name: TrackerName, run: TrackedRun, *, warn: Callable[[str], object] | None = None
    ) -> None:
        self.name = name
        self._run = run
        self._warn = warn or _to_stderr
        self._pending: queue.Queue[Event | None] = queue.Queue(MAX_PENDING)
        self._thread: threading.Thread | None = None
        self._has_failed = False
        self._tracker: Tracker | None = None
        self._step = 0
        self._status = "failed"  # unless an `end` event says otherwise

    def handle(self, event: Event) -> None:
        """Pass an event on; does not wait."""
        if self._has_failed:
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"weft-track-{self.name}", daemon=True
            )
            self._thread.start()
        try:
            self._pending.put_nowait(event)
        except queue.Full:
            self._fail(f"it is {MAX_PENDING:,} events behind")

    def close(self) -> None:
        """Wait until the tracker has written everything, CLOSE_S at most; may be called twice."""
        thread, self._thread = self._thread, None
        if thread is None or self._has_failed:
            return
        try:
            self._pending.put(None, timeout=CLOSE_S)
            thread.join(CLOSE_S)
        except queue.Full:
            pass
        if thread.is_alive():
            self._fail(f"it had not written everything {CLOSE_S:g} s after the end")

    def _work(self) -> None:
        """The thread: take events until the end of the run, or the first error."""
        try:
            while not self._has_failed and (event := self._pending.get()) is not None:
                self._pass_on(event)
            self._close_tracker(self._status)
        except Exception as error:  # noqa: BLE001 - a tracker may fail in any way, and training goes on
            self._fail(type_and_message(error))

    def _pass_on(self, event: Event) -> None:
        kind = str(event.get("event"))
        self._step = int(event.get("step") or self._step)
        if kind == "end":
            self._status = str(event.get("status"))
        if kind in ("resume", "restart"):  # later steps are trained again
            self._close_tracker("")
        numbers = numbers_of(event)
        text = text_of(event)
        if not numbers and not text:
            return
        if self._tracker is None:
            first_step = self._step if kind == "step" else self._step + 1
            self._tracker = open_tracker(self.name, self._run, first_step=first_step)
        if numbers:
            self._tracker.numbers(self._step, numbers)
        if text:
            self._tracker.text(self._step, kind, text)

    def _close_tracker(self, status: str) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close(status)

    def _fail(self, why: str) -> None:
        self._has_failed = True
        why = why.rstrip(".")
        self._warn(f"warning: track: {self.name} gets no more of this run: {why}. Training goes on")


def tracker_sinks(names: Sequence[TrackerName], run: TrackedRun) -> tuple[TrackerSink, ...]:
    """A sink for each tracker, once."""
    return tuple(TrackerSink(name, run) for name in dict.fromkeys(names))


def _to_stderr(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
