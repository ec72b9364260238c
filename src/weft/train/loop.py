"""Training loop of one rank: steps, evaluation, checkpoints and events."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Literal

from weft.checkpoint.memory import MemorySnapshots
from weft.checkpoint.saver import Saver, newest_path
from weft.config.schema import GuardConfig
from weft.errors import CorruptionError, GuardError, NonFiniteError
from weft.run.rank_status import OnPhase
from weft.train.best import EvalHistory
from weft.train.block_stats import BlockStats
from weft.train.data_loader import DataLoader
from weft.train.digest import StateDigests
from weft.train.event_lines import STEP_COUNTING
from weft.train.event_log import EventLog
from weft.train.guard import StepGuard
from weft.train.last_save import LastSave
from weft.train.loop_texts import non_finite_advice, restart_note, stop_note
from weft.train.sample_texts import SampleTexts
from weft.train.step import TrainStep
from weft.train.step_check import StepCheck
from weft.train.step_collection import collecting_by_step
from weft.train.step_loop import StepLoop, ignore_phase
from weft.train.step_profiler import StepProfiler
from weft.train.straggler import StragglerWatch
from weft.train.training import Evaluator, Event, StepRange, Training

Outcome = Literal["finished", "stopped"]


def run_training(
    training: Training,
    log: EventLog,
    *,
    with_more: Callable[[Event], Iterable[Event]] | None = None,
) -> Outcome:
    """Train; every rank calls it, and the event log of rank 0 writes.

    Args:
        with_more: an event -> what is logged for it: the event, and what follows from it.

    Raises:
        NonFiniteError: the loss or the gradient norm of a step is not finite; no update was made.
        SaveError: the last checkpoint could not be saved.
    """
    for name, text in training.files.items():
        log.write_versioned(name, text)
    for event in training.opening_events:
        log.emit(event)
    num_done = _run_steps(training, log, with_more)
    training.step.finish()
    if training.profiler is not None:
        for event in training.profiler.close():
            log.emit(event)
    history = EvalHistory()
    if training.evaluator is not None:
        history = training.evaluator.history
    num_steps = training.step_range.total
    is_finished = num_done >= num_steps or history.is_exhausted
    outcome: Outcome = "finished" if is_finished else "stopped"
    _save_last(training, log, num_done, outcome)
    if training.samples is not None and is_finished:
        on_token = partial(training.on_phase or ignore_phase, num_done, "end")
        log.emit(training.samples.event(num_done, on_token=on_token))
    newest = newest_path(training.run_folder)
    fields: Event = {}
    if history.best is not None:
        fields["best_step"] = history.best.step
        fields["best_loss"] = history.best.loss
    text = ""
    if not is_finished:
        text = stop_note(num_done, training.run_folder)
    elif num_done < num_steps:
        text = history.stop_text(num_done)
        fields["reason"] = "early_stop"
    log.end(outcome, checkpoint=str(newest) if newest else None, text=text, **fields)
    problem = training.saver.copy_run_files()
    if problem:
        log.note_after_end(f"warning: the events of the end are here only: {problem}")
    return outcome


def _run_steps(
    training: Training, log: EventLog, with_more: Callable[[Event], Iterable[Event]] | None
) -> int:
    """Train, and log the events; the number of steps that are done.

    Raises:
        GuardError: a guard stopped the run.
    """
    num_done = training.step_range.start
    num_steps = training.step_range.total
    events = step_events(
        training.step,
        training.loader,
        training.step_range,
        evaluator=training.evaluator,
        saver=training.saver,
        guard=training.guard,
        digests=training.digests,
        stragglers=training.stragglers,
        on_phase=training.on_phase,
        snapshots=training.snapshots,
        check=training.check,
        profiler=training.profiler,
        samples=training.samples,
        blocks=training.blocks,
    )
    try:
        with collecting_by_step(training.gc_every) as collect_after:
            for event in events:
                if event["event"] == "save_failed" and event.get("step") == num_steps:
                    event = {**event, "is_last": True}  # training does not continue
                logged: Iterable[Event] = (event,)
                if with_more is not None:
                    logged = with_more(event)
                for each in logged:
                    log.emit(each)
                if event["event"] in STEP_COUNTING:
                    num_done = int(event["step"])
                    collect_after(num_done)
    except GuardError as error:
        if training.check is not None:  # the verdict on a step that is wrong
            for verdict in training.check.take_events():
                log.emit(verdict)
        for event in training.saver.finish(num_done, save=False):
            log.emit(event)
        training.saver.close()
        raise _with_advice(error, training, num_done) from None
    return num_done


def _with_advice(error: GuardError, training: Training, num_done: int) -> GuardError:
    """The error that stopped the run after `num_done` steps, with how to go on."""
    folder = training.run_folder
    if isinstance(error, CorruptionError):
        how = restart_note(folder)
        return CorruptionError(f"{error}. Stopped, and saved nothing. {how}")
    if isinstance(error, NonFiniteError):
        replay = f"weft replay {shlex.quote(str(folder))} --step {num_done + 1}"
        advice = non_finite_advice(folder, num_done, peak_lr=training.peak_lr)
        return NonFiniteError(
            f"{error}. Stopped before the update. Repeat the step on one device: {replay}. {advice}"
        )
    return error


def _save_last(training: Training, log: EventLog, num_done: int, outcome: Outcome) -> None:
    """Save the last step, where the run does or was asked to stop.

    Raises:
        SaveError: it could not be saved.
    """
    saver = training.saver
    report_phase = training.on_phase or ignore_phase
    report_phase(num_done, "save")
    if training.save_at_end or outcome == "stopped":
        last_save = LastSave(
            saver=saver,
            run_folder=training.run_folder,
            step=num_done,
            outcome=outcome,
            wait_s=0.0 if outcome == "stopped" else training.save_wait_s,
            on_wait=partial(report_phase, num_done, "save"),
        )
        events = last_save.events()
    else:
        events = saver.finish(num_done, save=False)
    for event in events:
        log.emit(event)
    saver.close()
    report_phase(num_done, "end")


def step_events(
    step: TrainStep,
    loader: DataLoader,
    step_range: StepRange,
    *,
    evaluator: Evaluator | None = None,
    saver: Saver | None = None,
    guard: StepGuard | None = None,
    digests: StateDigests | None = None,
    stragglers: StragglerWatch | None = None,
    on_phase: OnPhase | None = None,
    snapshots: MemorySnapshots | None = None,
    check: StepCheck | None = None,
    profiler: StepProfiler | None = None,
    samples: SampleTexts | None = None,
    blocks: BlockStats | None = None,
) -> Iterator[Event]:
    """Train step by step; yields the events of steps, evaluations, saves, guards and texts. Ends early
    after a stop request.

    Args:
        guard: judges every step; default: stops at one that is not finite.
        digests: compare the training state of replicas.
        stragglers: reports slow ranks.
        check: compares some steps before their update.
        profiler: records some steps.
        samples: texts that the model generates.
        blocks: measures the blocks of some steps.

    Raises:
        NonFiniteError: the loss or the gradient norm of a step is not finite; no update was made.
        CorruptionError: replicas differ, or the state changed between two updates.
    """
    if guard is None:
        guard = StepGuard(GuardConfig(), loader, step.model.comm.mesh)
    steps = StepLoop(
        step=step,
        loader=loader,
        step_range=step_range,
        evaluator=evaluator,
        saver=saver,
        guard=guard,
        digests=digests,
        stragglers=stragglers,
        on_phase=on_phase,
        snapshots=snapshots,
        check=check,
        profiler=profiler,
        samples=samples,
        blocks=blocks,
    )
    if saver is not None and guard.needs_first_save:
        yield from saver.save(step_range.start)
    start: int | None = step_range.start
    if evaluator is not None and evaluator.history.is_exhausted:
        start = None
    while start is not None:
        start = yield from steps.train_from(start)
