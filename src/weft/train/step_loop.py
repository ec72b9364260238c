"""The steps of a run, one after the other: each is trained, judged and logged; evaluation, saves and snapshots follow it."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from weft.checkpoint.memory import DUE, MemorySnapshots
from weft.checkpoint.saver import Saver, StatusFlag
from weft.errors import CorruptionError, GuardError, NonFiniteError
from weft.models.common.batch import Batch
from weft.run.rank_status import OnPhase, Phase
from weft.train.block_stats import BlockStats
from weft.train.data_loader import DataLoader, prefetch
from weft.train.digest import StateDigests, StateFault
from weft.train.evaluate import eval_event
from weft.train.guard import FailedStep, StepGuard
from weft.train.late_report import LateReports, LaunchedStep, reports_late
from weft.train.loop_texts import step_event
from weft.train.sample_texts import SampleTexts
from weft.train.step import ComputedStep, StepReport, TrainStep
from weft.train.step_check import OnGradients, StepCheck
from weft.train.step_profiler import StepProfiler
from weft.train.step_stats import StepTotals
from weft.train.straggler import StragglerWatch
from weft.train.training import Evaluator, Event, StepRange

CHECKED_STEPS = 2
"""First steps in which members of every group compare the signatures of collectives; later steps
repeat the same ones.
"""

LATER_FLAGS = StatusFlag.STOP_REQUESTED | DUE
"""Status flags that ask for something after the step in which they are seen."""


@dataclass
class _StepClock:
    """What the loop keeps from step to step.

    Attributes:
        last_s: time.perf_counter() of the last event.
        has_experts: whether the last step had a load of experts.
        carried: flags of a late report, for the next step: what they ask for needs its state.
    """

    last_s: float
    has_experts: bool = False
    carried: int = 0


@dataclass(frozen=True)
class _Left:
    """The loop ends.

    Attributes:
        start: the number of steps to go on from; None at the end of the run.
    """

    start: int | None


@dataclass(frozen=True)
class StepLoop:
    """The steps of a run, from any of them on."""

    step: TrainStep
    loader: DataLoader
    step_range: StepRange
    evaluator: Evaluator | None
    saver: Saver | None
    guard: StepGuard
    digests: StateDigests | None
    stragglers: StragglerWatch | None
    on_phase: OnPhase | None
    snapshots: MemorySnapshots | None
    check: StepCheck | None = None
    profiler: StepProfiler | None = None
    samples: SampleTexts | None = None
    blocks: BlockStats | None = None

    def train_from(self, start: int) -> Generator[Event, None, int | None]:
        """Train the steps after the first `start`; returns where to go on after a rollback, None at
        the end.
        """
        comm = self.step.model.comm
        steps = range(start, self.step_range.total)
        batch_numbers = map(self.guard.batch_of, steps)
        report_phase = self.on_phase or ignore_phase
        clock = _StepClock(time.perf_counter())
        may_be_late = reports_late(self.step) and self.digests is None
        late = LateReports(self.step) if may_be_late else None
        waiting: LaunchedStep | None = None
        with prefetch(self.loader.batches, batch_numbers, most=self.step_range.prefetch) as batches:
            for index in steps:
                number = index + 1
                if self.profiler is not None:
                    yield from self.profiler.before_step(number)
                report_phase(number, "data")
                is_first = index < start + CHECKED_STEPS
                comm.checked = is_first
                lr = self.step_range.learning_rate(index)
                batch = next(batches)
                # Launched before the numbers of the step before are waited for: the device has work meanwhile.
                launched: LaunchedStep | None = None
                left: _Left | None = None
                if late is not None and not (
                    is_first or clock.has_experts or self._is_checked(number)
                ):
                    launched = late.launch(
                        number, batch, lr=lr, status=self._status, on_phase=self._phase_of(number)
                    )
                if late is not None and waiting is not None:
                    left, is_repeated = yield from self._read_late(late, waiting, clock)
                    if is_repeated:
                        launched = None  # it was left out, or is not of the state there is now
                    waiting = None
                if left is None and launched is None:
                    report = self._run_checked(number, batch, lr)
                    left = yield from self._after_step(number, report, lr, clock)
                elif left is None and launched is not None and late is not None:
                    waiting = launched
                    if clock.carried or self._ends_wait(number):
                        left, _ = yield from self._read_late(late, launched, clock)
                        waiting = None
                if left is not None:
                    return left.start
        return None

    def _is_checked(self, number: int) -> bool:
        """Whether something reads the gradients of a step before its update."""
        is_measured = self.blocks is not None and self.blocks.is_due(number)
        return is_measured or (self.check is not None and self.check.is_due(number))

    def _run_checked(self, number: int, batches: Sequence[Batch], lr: float) -> StepReport:
        """Train on a step, wait for its numbers, and check it before its update and measure its
        blocks where that is due.
        """
        with ExitStack() as stack:
            on_gradients = None
            if self.blocks is not None and self.blocks.is_due(number):
                stack.enter_context(self.blocks.watch())
                on_gradients = self.blocks.measure
            if self.check is not None and self.check.is_due(number):
                batch_number = self.guard.batch_of(number - 1)
                check = stack.enter_context(self.check.watch(number, batch_number, batches))
                both = partial(_call_both, check, on_gradients) if on_gradients else check
                return self._run(number, batches, lr, on_gradients=both)
            return self._run(number, batches, lr, on_gradients=on_gradients)

    def _run(
        self,
        number: int,
        batches: Sequence[Batch],
        lr: float,
        on_gradients: OnGradients | None = None,
    ) -> StepReport:
        """Train on a step and wait for its numbers."""
        return self.step(
            batches,
            lr=lr,
            status=self._status,
            on_phase=self._phase_of(number),
            on_nonfinite="skip",
            on_gradients=on_gradients,
        )

    def _phase_of(self, number: int) -> Callable[[Phase], None] | None:
        return partial(self.on_phase, number) if self.on_phase else None

    def _ends_wait(self, number: int) -> bool:
        """Whether what follows a step needs its state: an evaluation, a save, a snapshot, a text, the
        end.
        """
        snapshots = self.snapshots
        return (
            number == self.step_range.total
            or (self.evaluator is not None and self.evaluator.is_due(number))
            or (self.saver is not None and self.saver.is_due(number))
            or (snapshots is not None and snapshots.is_due(number, 0))
            or (self.samples is not None and self.samples.is_due(number))
        )

    def _read_late(
        self, late: LateReports, launched: LaunchedStep, clock: _StepClock
    ) -> Generator[Event, None, tuple[_Left | None, bool]]:
        """What follows a launched step: where the run leaves the loop, and whether the step was
        repeated, because it is not finite. See Note [Reports one step late].
        """
        number, lr = launched.number, launched.lr
        report = late.read(launched)
        is_repeated = report is None
        if report is None:
            late.forget()
            report = self._run(number, launched.batches, lr)
        elif not self._ends_wait(number) and not clock.carried:
            clock.carried = report.status & LATER_FLAGS
            report = replace(report, status=report.status & ~LATER_FLAGS)
        else:
            report = replace(report, status=report.status | clock.carried)
            clock.carried = 0
        left = yield from self._after_step(number, report, lr, clock)
        return left, is_repeated

    def _after_step(
        self, number: int, report: StepReport, lr: float, clock: _StepClock
    ) -> Generator[Event, None, _Left | None]:
        """Judge a step, log it, and do what follows it; where the run leaves the loop, if it does."""
        report_phase = self.on_phase or ignore_phase
        clock.has_experts = report.expert_load is not None
        yield from self._check_unchanged(number, report)
        failed = self.guard.judge(number, report)
        if failed is not None:
            yield from self._after_failure(failed)
            if failed.action == "rollback":
                return _Left((yield from self._roll_back(failed)))
        now = time.perf_counter()
        report_phase(number, "end")
        yield step_event(number, report, lr=lr, elapsed_s=now - clock.last_s)
        clock.last_s = now
        if self.blocks is not None:
            yield from self.blocks.take_event(number)
        if self.check is not None:
            yield from map(dict, self.check.take_events())
        if self.stragglers is not None:
            yield from self.stragglers.after_step(number)
        best_loss: float | None = None
        if self.evaluator is not None and self.evaluator.is_due(number):
            report_phase(number, "evaluate")
            best_loss = yield from self._evaluate(number, self.evaluator)
            clock.last_s = time.perf_counter()
        is_best = best_loss is not None
        # Before the save: what differs between replicas, or was damaged, is not to be stored.
        yield from self._compare_replicas(number, report, is_best=is_best)
        if self.saver is not None:
            report_phase(number, "save")
            yield from self.saver.after_step(number, report.status, best_loss=best_loss)
        if self.snapshots is not None:
            yield from self.snapshots.after_step(number, report.status)
        if report.status & StatusFlag.STOP_REQUESTED:
            return _Left(None)
        if self.evaluator is not None and self.evaluator.history.is_exhausted:
            return _Left(None)
        if self.samples is not None and self.samples.is_due(number):
            on_token = partial(report_phase, number, "evaluate")
            yield self.samples.event(number, on_token=on_token)
            clock.last_s = time.perf_counter()
        return None

    def _evaluate(self, number: int, evaluator: Evaluator) -> Generator[Event, None, float | None]:
        """Evaluate after a step; returns the loss where it is to be saved as the lowest so far."""
        report = evaluator.evaluation()
        yield eval_event(number, report)
        is_best = evaluator.history.add(number, report.loss)
        if is_best and evaluator.saves_best:
            return report.loss
        return None

    def _status(self) -> int:
        """Status flags of this rank, just before the update."""
        if self.saver:
            status = self.saver.status()
        else:
            status = StatusFlag(0)
        if self.digests is not None and self.digests.has_changed():
            status |= StatusFlag.STATE_CHANGED
        if self.snapshots is None:
            return int(status)
        return int(status) | self.snapshots.status()

    def _check_unchanged(self, number: int, report: StepReport) -> Iterator[Event]:
        """Stop if the state of a rank changed since the last comparison of replicas.

        Raises:
            CorruptionError: it did.
        """
        if report.status & StatusFlag.STATE_CHANGED and self.digests is not None:
            yield from _stop_at(number, self.digests.changed_fault(number))

    def _compare_replicas(
        self, number: int, report: StepReport, *, is_best: bool
    ) -> Iterator[Event]:
        """Compare replicas, where that is due, and before every save and snapshot.

        Args:
            is_best: whether the step is saved for its evaluation loss.

        Raises:
            CorruptionError: they differ.
        """
        if self.digests is None:
            return
        is_last = number == self.step_range.total
        is_stopping = bool(report.status & StatusFlag.STOP_REQUESTED)
        is_saved = is_best or (self.saver is not None and self.saver.is_due(number))
        if self.snapshots is not None and self.snapshots.is_due(number, report.status):
            is_saved = True
        if not (self.digests.is_due(number) or is_saved or is_last or is_stopping):
            return
        fault = self.digests.compare(number)
        if fault is not None:
            yield from _stop_at(number, fault)

    def _after_failure(self, failed: FailedStep) -> Iterator[Event]:
        """The event of a failed step.

        Raises:
            NonFiniteError: the guard stops the run.
        """
        yield failed.event()
        if failed.action == "stop" and failed.kind == "nonfinite":
            raise NonFiniteError(failed.text)
        if failed.action == "stop":
            raise GuardError(f"{failed.text}. Stopped after the update, which is not saved")

    def _roll_back(self, failed: FailedStep) -> Generator[Event, None, int]:
        """Go back to the newest checkpoint; returns its number of steps."""
        # A save under way reads the tensors that the rollback writes, and it may be of a step that failed.
        if self.saver is not None:
            yield from self.saver.wait()
        if self.snapshots is not None:
            yield from self.snapshots.wait()
        restored = self.guard.roll_back(failed)
        if self.evaluator is not None:
            self.evaluator.history.forget_above(restored.num_done)
        if self.snapshots is not None:
            self.snapshots.remove_above(restored.num_done)
        if self.digests is not None:
            self.digests.forget()
        yield restored.event
        return restored.num_done


def _call_both(
    first: OnGradients, second: OnGradients, computed: ComputedStep, totals: StepTotals
) -> None:
    first(computed, totals)
    second(computed, totals)


def _stop_at(step: int, fault: StateFault) -> Iterator[Event]:
    """The event of a damaged training state.

    Raises:
        CorruptionError: always, after the event.
    """
    yield {
        "event": "guard",
        "kind": "digest",
        "step": step,
        "action": "stop",
        "rank": fault.ranks[0],
        "ranks": list(fault.ranks),
        "tensors": list(fault.tensors),
        "text": f"guard: {fault.text}. Stopping",
    }
    raise CorruptionError(fault.text)


def ignore_phase(step: int, phase: Phase) -> None:
    """Do nothing."""
