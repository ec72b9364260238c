"""The worker processes of one run: forked, watched and ended together; none outlives its group."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path

from weft.core.dimension import dimensions
from weft.core.mesh import Mesh
from weft.errors import EXIT_OK, EXIT_PREEMPTED, Fault, LaunchError
from weft.run.devices import fork_problem
from weft.run.failure import RankFailure, describe_exit
from weft.run.worker import STACK_SIGNAL, RankResult, WorkerProcess, fork_worker

POLL_S = 0.02
EXIT_POLL_S = 0.001
"""Between looks at a worker that has closed its pipe and is about to end."""
SETTLE_S = 0.3
"""After the first failure, time for reports of the others: one of them may be the cause."""
SURE_SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGBUS)
"""Ends that another rank does not cause: they are the root cause at once."""
GRACE_S = 1.0
"""Between a signal that ends a worker and SIGKILL."""
PRELOAD = ("numpy.ma", "torch.fx.experimental.symbolic_shapes")
"""Modules that the first backward pass would import in every rank (485 modules, 0.4 s)."""
SCRIPT_PRELOAD = ("torch._dynamo",)
"""Those that the first step of an optimizer of torch.optim would (829 modules, 1 s, 70 MB)."""
EXIT_TERMINATED = 128 + signal.SIGTERM

# Note [Garbage collection in ranks]
# A rank inherits 300,000 objects of imported modules. The first full collection in each rank looked at all of them, and so
# copied the pages that it shares with its parent. One collection before the fork leaves nothing for it to do; frozen, they are
# left alone by later ones too, which come by step: see Note [Garbage collection by step] of train/step_collection.py.
# A rank of 16 needs 0.18 instead of 0.40 s of CPU time until its first step.


def fork_workers(
    size: int,
    folder: Path,
    *,
    mesh: Mesh | None = None,
    close: Connection | None = None,
    are_scripts: bool = False,
) -> WorkerProcess | WorkerGroup:
    """Fork this process `size` times: each fork returns its WorkerProcess, the parent returns the
    WorkerGroup.

    Requires that no other thread runs and no tensor was computed: OpenMP and CUDA do not survive a
    fork.

    Args:
        folder: holds the stack files.
        mesh: the modules that its dimensions need are imported before the ranks are forked.
        close: a connection of the parent that the workers close.
        are_scripts: whether ranks go on with the script of a user, whose end is that of Python and
            is not reported.

    Raises:
        LaunchError: the system cannot start another process, or CUDA or autograd has started
            threads that do not survive a fork.
    """
    problem = fork_problem()
    if problem:
        fix = (
            "start the ranks (weft.init) before anything is computed, "
            f"or run torchrun --nproc-per-node {size} with this script"
        )
        raise LaunchError(Fault("ranks", problem, fix=fix))
    import_modules_of_ranks(mesh, more=SCRIPT_PRELOAD if are_scripts else ())
    had_frozen = gc.get_freeze_count() > 0  # forks of the fork server have, and keep it so
    gc.collect()
    gc.freeze()  # see Note [Garbage collection in ranks]
    group = WorkerGroup(reports_ends=not are_scripts)
    inherited = [] if close is None else [close]
    for rank in range(size):
        try:
            worker = fork_worker(rank, folder / f"stack{rank}.txt", close=inherited)
        except OSError as error:
            group.kill()
            _unfreeze(unless=had_frozen)
            raise LaunchError(
                Fault("ranks", f"cannot start rank {rank} of {size}", got=str(error))
            ) from error
        if worker.pid == 0:
            return worker
        group.workers.append(worker)
        inherited.append(worker.pipe)
    _unfreeze(unless=had_frozen)
    return group


def _unfreeze(*, unless: bool) -> None:
    if not unless:
        gc.unfreeze()


def import_modules_of_ranks(mesh: Mesh | None, *, more: Sequence[str] = ()) -> None:
    """Import what every rank of the mesh would import, before it is forked."""
    names = [*PRELOAD, *more]
    if mesh is not None:
        transforms = [dimension.transform for dimension in dimensions().values()]
        names += [transform.partition(":")[0] for transform in transforms if transform]
    for name in names:
        with suppress(ImportError):
            import_module(name)


class WorkerGroup:
    """The workers of one run, in the process that forked them.

    Args:
        reports_ends: whether an end without a report is a failure, see Note [Orderly ends].

    Attributes:
        failures: in the order in which they were found, without those that followed from ending the
            group.
    """

    def __init__(self, *, reports_ends: bool) -> None:
        self.reports_ends = reports_ends
        self.workers: list[WorkerProcess] = []
        self.failures: list[RankFailure] = []
        self._settled_at = float("inf")
        self._stop_requested = False
        self._is_ending = False

    def running(self) -> list[WorkerProcess]:
        """The workers that have not ended."""
        return [worker for worker in self.workers if worker.exit_code is None]

    def is_settled(self) -> bool:
        """Whether a worker has failed and the others had time to report the cause."""
        return time.monotonic() >= self._settled_at

    def certain_failures(self) -> list[RankFailure]:
        """Reports of errors that another rank does not cause: known before their ranks have ended."""
        failures = []
        for worker in self.workers:
            report = worker.report
            if isinstance(report, RankFailure) and report.kind == "error":
                failures.append(report)
        return failures

    def poll(self, timeout_s: float, *, client: Connection | None = None) -> bool:
        """Wait at most `timeout_s` for reports and ends, and record them; whether `client` can be
        read or was closed.
        """
        running = self.running()
        if any(worker.pipe.closed for worker in running):
            timeout_s = min(timeout_s, EXIT_POLL_S)
        watched = [worker.pipe for worker in running if not worker.pipe.closed]
        if client is not None:
            watched.append(client)
        if watched:
            ready = wait(watched, timeout_s)
        else:
            ready = []
            time.sleep(timeout_s)
        for worker in running:
            if worker.pipe in ready:
                _receive(worker)
            if _has_ended(worker):
                self._collect(worker)
        return client in ready

    def request_stop(self) -> None:
        """Ask the workers to save and stop."""
        self._stop_requested = True
        self.send_signal(signal.SIGTERM)

    def pause(self) -> None:
        """Stop the workers and this process until SIGCONT."""
        self.send_signal(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)
        self.send_signal(signal.SIGCONT)

    def send_signal(self, number: int) -> None:
        """Send a signal to the process groups of all running workers."""
        for worker in self.running():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.pid, number)

    def terminate(self, number: int, *, hurry: Callable[[], bool] = lambda: False) -> None:
        """Send `number`, and SIGKILL to the workers that still run after GRACE_S, or once `hurry`
        returns True.
        """
        self._is_ending = True
        self.send_signal(number)
        deadline = time.monotonic() + GRACE_S
        while self.running() and time.monotonic() < deadline and not hurry():
            self.poll(POLL_S)
        self.kill()

    def kill(self) -> None:
        """SIGKILL all running workers and wait until they have ended."""
        self._is_ending = True
        self.send_signal(signal.SIGKILL)
        while self.running():
            self.poll(POLL_S)

    def stacks(self) -> dict[int, str]:
        """The stacks of the running workers by rank, as far as they write them within SETTLE_S."""
        running = self.running()
        if not running:
            return {}
        for worker in running:
            os.kill(worker.pid, STACK_SIGNAL)
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not all(worker.stack() for worker in running):
            time.sleep(0.01)
        time.sleep(POLL_S)  # the last one may still be writing
        return {worker.rank: worker.stack() for worker in running}

    def stack_of(self, worker: WorkerProcess) -> str:
        """The stack of one worker that is about to be killed; a stopped one has to run for it."""
        os.kill(worker.pid, STACK_SIGNAL)
        os.kill(worker.pid, signal.SIGCONT)
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and not worker.stack():
            time.sleep(0.005)
        time.sleep(POLL_S)  # it may still be writing
        return worker.stack()

    def kill_one(self, worker: WorkerProcess) -> None:
        """SIGKILL one worker, whose end is no failure of its own any more."""
        self._is_ending = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)

    def results(self) -> dict[int, bytes]:
        """The values that workers reported, by rank."""
        reports = [worker.report for worker in self.workers]
        return {report.rank: report.value for report in reports if isinstance(report, RankResult)}

    def exit_code(self) -> int:
        """The exit code of a group that ended without a failure: 75 if a worker saved and stopped,
        143 if one was ended.
        """
        codes = {worker.exit_code for worker in self.workers}
        if EXIT_PREEMPTED in codes:
            return EXIT_PREEMPTED
        if -signal.SIGTERM in codes or -signal.SIGKILL in codes:
            return EXIT_TERMINATED
        return EXIT_OK

    def _collect(self, worker: WorkerProcess) -> None:
        """Record the end of a worker, and kill the processes that it has left."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, signal.SIGKILL)
        _, status = os.waitpid(worker.pid, 0)
        worker.exit_code = os.waitstatus_to_exitcode(status)
        # a report may have been written just before the end
        while not worker.pipe.closed and worker.pipe.poll():
            _receive(worker)
        worker.pipe.close()
        failure = self._failure_of(worker, worker.exit_code)
        if failure is not None and not self._is_ending:
            self.failures.append(failure)
            is_sure = -worker.exit_code in SURE_SIGNALS
            settle_s = 0.0 if is_sure else SETTLE_S
            self._settled_at = min(self._settled_at, time.monotonic() + settle_s)

    def _failure_of(self, worker: WorkerProcess, code: int) -> RankFailure | None:
        if isinstance(worker.report, RankFailure):
            return worker.report
        stopped_as_requested = self._stop_requested and code == -signal.SIGTERM
        has_reported = worker.report is not None or not self.reports_ends
        if stopped_as_requested or (code in (EXIT_OK, EXIT_PREEMPTED) and has_reported):
            return None
        return describe_exit(code, rank=worker.rank, at_s=time.monotonic(), trace=worker.stack())


def _has_ended(worker: WorkerProcess) -> bool:
    """Whether the process has ended; it stays in the process table, so that its process group can
    still be killed.
    """
    return os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _receive(worker: WorkerProcess) -> None:
    """Read a report, of which the first counts, or close the pipe at its end."""
    try:
        report = worker.pipe.recv()
    except (EOFError, OSError):  # OSError: the worker ended within a report
        worker.pipe.close()
        return
    # a rank that reports early, and again when it ends, has failed by the first
    if worker.report is None:
        worker.report = report
