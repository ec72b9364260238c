"""Supervision of local ranks by the process that forked them: signals, deaths, hangs, and when to start the ranks again.

wait for reports and ends ---> a rank has failed ------------+
  | ten times a second                                       +--> Failed: end all ranks; `launch` restarts them
  read the status board ---> a rank hangs (HangWatch) -------+
"""

from __future__ import annotations

import re
import signal
import time
from dataclasses import dataclass

from weft.core.mesh import Mesh
from weft.errors import EXIT_QUIT
from weft.run.failure import REPEATED_KINDS, RankFailure, root_cause
from weft.run.hang import Hang
from weft.run.hang_watch import HangWatch
from weft.run.process_state import ProcessState, process_state
from weft.run.rank_status import StatusBoard
from weft.run.signals import SignalQueue
from weft.run.worker_group import POLL_S, WorkerGroup

AMOUNT = re.compile(r"\d[\d,.]* (s|bytes|B|[KMGT]iB)\b")


@dataclass(frozen=True)
class SupervisedEnd:
    """How the ranks of one attempt have ended.

    Attributes:
        code: the exit code, if none failed.
        failure: the root cause, with its place in the text; None if none failed.
        step: the last step that any rank worked on; 0 before the first.
        detected_s: from the fault to its detection: for a hang the time without progress, for a
            death the time since the rank was last seen alive.
        at_s: time.monotonic() of the detection.
        is_requested: whether the user has asked the run to end.
        is_pause: whether the failure is a rank that was too long in code, which may be a pause.
    """

    code: int = 0
    failure: RankFailure | None = None
    step: int = 0
    detected_s: float = 0.0
    at_s: float = 0.0
    is_requested: bool = False
    is_pause: bool = False


class Supervisor:
    """Waits for the workers of one attempt.

    SIGTERM, SIGHUP and SIGUSR1 are passed on as SIGTERM: workers may save and exit with code 75. A
    second SIGTERM or SIGHUP kills them, and so does SIGQUIT. SIGTSTP (Ctrl-Z) pauses them too.

    Args:
        timeout_s, patience: see `HangDetector`.
    """

    def __init__(
        self,
        group: WorkerGroup,
        signals: SignalQueue,
        board: StatusBoard,
        *,
        timeout_s: float = 0.0,
        patience: int = 1,
        mesh: Mesh | None = None,
    ) -> None:
        self.group = group
        self.signals = signals
        self._watch = HangWatch(board, mesh=mesh, timeout_s=timeout_s, patience=patience)
        self._seen_alive_s = time.monotonic()
        self._was_terminated = False
        self._is_requested = False

    def wait(self) -> SupervisedEnd:
        """Wait until all workers have ended, by themselves or because one failed.

        Raises:
            KeyboardInterrupt: on SIGINT, after all workers have ended.
        """
        group = self.group
        while group.running():
            polled_s = time.monotonic()
            group.poll(POLL_S)
            if not group.failures:
                # the time before the look: a rank that dies during it was alive then
                self._seen_alive_s = polled_s
            certain = group.certain_failures()
            # a certain failure at once: its rank may take seconds to end, or not end at all
            if certain or group.is_settled():
                return self._failed(root_cause([*group.failures, *certain]))
            code = self._handle_signal()
            if code is not None:
                return SupervisedEnd(code, is_requested=True)
            running = [worker.rank for worker in group.running()]
            hang = self._watch.check(running, self._state_of)
            if hang is not None:
                return self._hung(hang)
        if group.failures:
            return self._failed(root_cause(group.failures))
        return SupervisedEnd(group.exit_code(), is_requested=self._is_requested)

    def terminate(self) -> None:
        """Ask the workers that are left after a failure to end, and kill them after some time."""
        self.group.terminate(signal.SIGTERM, hurry=lambda: self.signals.next() is not None)

    def _handle_signal(self) -> int | None:
        """Handle the oldest signal; the exit code if it has ended the ranks at once."""
        group = self.group
        match self.signals.next():
            case signal.SIGINT:
                group.terminate(signal.SIGINT, hurry=lambda: self.signals.next() is not None)
                raise KeyboardInterrupt
            case signal.SIGTERM | signal.SIGHUP if self._was_terminated:
                group.kill()
            case signal.SIGTERM | signal.SIGHUP:
                self._was_terminated = True
                self._is_requested = True
                group.request_stop()
            case signal.SIGUSR1:
                self._is_requested = True
                group.request_stop()
            case signal.SIGQUIT:
                group.kill()
                return EXIT_QUIT
            case signal.SIGTSTP:
                group.pause()
        return None

    def _state_of(self, rank: int) -> ProcessState:
        return process_state(self.group.workers[rank].pid)

    def _hung(self, hang: Hang) -> SupervisedEnd:
        """The end of a hang: the stack of the culprit is taken before all ranks are killed."""
        detected_s = time.monotonic()
        worker = self.group.workers[hang.ranks[0]]
        stack = ""
        if worker.exit_code is None:
            # while it hangs: a process that is killed leaves no stack
            stack = self.group.stack_of(worker)
            self.group.kill_one(worker)
        return SupervisedEnd(
            failure=self._watch.failure_of(hang, stack=stack, at_s=detected_s),
            step=self._watch.step,
            detected_s=hang.seconds,
            at_s=detected_s,
            is_requested=self._is_requested,
            is_pause=hang.kind == "stuck",
        )

    def _failed(self, failure: RankFailure) -> SupervisedEnd:
        now_s = time.monotonic()
        found_s = min(now_s, failure.at_s)
        return SupervisedEnd(
            failure=self._watch.with_place(failure),
            step=self._watch.step,
            detected_s=max(0.0, found_s - self._seen_alive_s),
            at_s=now_s,
            is_requested=self._is_requested,
        )


@dataclass(frozen=True)
class RestartPolicy:
    """Whether the ranks are started again after a failure: at most `most` times, not after errors
    that every start would repeat, and not when the same failure comes back without progress.

    Attributes:
        patience: of the hang rule in the next attempt. A pause that comes back without progress is
            tried again, with twice the time.
    """

    most: int
    num_done: int = 0
    last_text: str = ""
    last_step: int = -1
    patience: int = 1

    def allows(self, end: SupervisedEnd) -> bool:
        """Whether the ranks are started again."""
        failure = end.failure
        if failure is None or end.is_requested or self.num_done >= self.most:
            return False
        # a start would end in the same error, after it has read and built everything anew
        if failure.kind in REPEATED_KINDS:
            return False
        return end.is_pause or not self._repeats(failure, end.step)

    def _repeats(self, failure: RankFailure, step: int) -> bool:
        return (_without_amounts(failure), step) == (self.last_text, self.last_step)

    def after(self, end: SupervisedEnd) -> RestartPolicy:
        """The policy after a restart."""
        assert end.failure is not None, "ranks are started again after a failure"
        patience = 1
        if end.is_pause:
            patience = 2 * self.patience if self._repeats(end.failure, end.step) else 2
        return RestartPolicy(
            self.most,
            self.num_done + 1,
            last_text=_without_amounts(end.failure),
            last_step=end.step,
            patience=patience,
        )


def _without_amounts(failure: RankFailure) -> str:
    """Rank and text of a failure without seconds and bytes, which differ from time to time."""
    text = AMOUNT.sub("", failure.text)
    return f"{failure.rank}: {text}"
