"""Build the training run of one rank: its steps, guards, checkpoints, evaluation and first events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint.folder import checkpoints, remove_leftovers, set_aside
from weft.checkpoint.format import Facts
from weft.checkpoint.memory import MemorySnapshots, clean, room_problem, snapshots_in_folder
from weft.checkpoint.node_memory import NodeMemory, clean_node, snapshots_on_nodes
from weft.checkpoint.remote import RemoteCopies
from weft.checkpoint.saver import Saver
from weft.checkpoint.transfer import ranks_without_folder
from weft.comm.comm import Comm
from weft.comm.text import broadcast_text, raise_on_all_ranks
from weft.config.elastic import elastic_note
from weft.config.run import Run
from weft.config.schema import EvalConfig, GuardConfig, ModelSection, SaveConfig
from weft.config.toml import dump
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.data.conversations import truncation_note
from weft.data.dataset import open_validation
from weft.data.order import batch_of_step
from weft.data.samples import Samples
from weft.models import FAMILIES
from weft.run.world import Attempt
from weft.train.best import recorded_history
from weft.train.build import RunSteps, build_run_steps
from weft.train.digest import StateDigests
from weft.train.evaluate import Evaluation
from weft.train.guard import StepGuard
from weft.train.guard_records import FOLDER as GUARD_FOLDER
from weft.train.guard_records import left_out_batches, read_records
from weft.train.run_records import (
    facts_of,
    note_event,
    opening_notes,
    optimizer_group_notes,
    optimizer_text,
    proof_event,
    run_event,
)
from weft.train.run_start import restore_newest
from weft.train.step import TrainStep
from weft.train.step_phases import report_blocks
from weft.train.straggler import StragglerWatch
from weft.train.training import Evaluator, Event, Training


def build_training(
    run: Run,
    comm: Comm,
    *,
    stop_requested: Callable[[], bool],
    attempt: Attempt | None = None,
    samples: Samples | None = None,
    proof: Mapping[str, Any] | None = None,
    makes_copies: bool = False,
) -> Training:
    """The training run of this rank, initialised or restored from the checkpoint that `resume`
    means; every rank calls it.

    Args:
        attempt: of a supervised rank: its status, where it takes snapshots, and why it was started
            again; then it resumes from the newest snapshot or checkpoint.
        samples: the opened data; default: that of the run.
        proof: verdict of the proof before the first step, for the records of the run.
        makes_copies: whether checkpoints are copied to `save.remote`; what only repeats a run leaves
            its URL alone.

    Raises:
        CheckpointError: the checkpoints that `resume` means are not valid, or of another run; the
            same on all ranks.
        DataError: the data is not what the checkpoint was trained on.
    """
    # Rank 0 names a new run folder, and sees whether an agent has started the ranks again.
    words = broadcast_text(comm, f"{run.out or ''}\0{run.resume or ''}")
    out, _, resume = words.partition("\0")
    run = run.with_values({"out": out, "resume": resume or None})
    run_folder = Path(out)
    steps = build_run_steps(
        run,
        comm,
        attempt=attempt,
        samples=samples,
        writes_references=True,
    )
    step = steps.step
    start = steps.start
    if attempt is not None:
        report_blocks(step.model.blocks, attempt.status.on_block)
    set_aside_paths = _clean_folder(run_folder, comm, above=start.num_done)
    guard = _build_guard(
        run.guard,
        steps,
        run_folder=run_folder,
    )
    config = run.model_dump(mode="json")
    facts = facts_of(
        run.model,
        config,
        step,
        steps.samples,
        guard=lambda: guard.state,
        proof=proof,
    )
    snapshots = _Snapshots()
    if attempt is not None:
        snapshots = _build_snapshots(
            steps,
            attempt,
            facts=facts,
            every=run.save.memory_every,
        )
    remote = None
    if makes_copies:
        remote = _open_remote(run.save, comm, run_folder, num_done=start.num_done)
    saver = Saver(
        comm,
        run_folder,
        state=step.state,
        facts=facts,
        every=run.save.every,
        keep=run.save.keep,
        stop_requested=stop_requested,
        last_saved=start.num_saved,
        separate=_separate_ranks(comm, run_folder, attempt=attempt),
        remote=remote,
    )
    evaluator = None
    if run.eval.every:
        evaluator = _build_evaluator(
            run.eval,
            steps,
            open_validation(run.data, run.model, source=run.eval.source),
            run_folder=run_folder,
            saves_best=run.save.best,
        )
    optimizer = optimizer_text(run.optim, run.lora, run.model)
    opening_events = _start_events(
        steps,
        run_event(config, step, steps.samples, optimizer=optimizer),
        resumes=run.resume is not None,
        set_aside_paths=set_aside_paths,
        attempt=attempt,
    )
    notes = _opening_notes(
        run,
        steps,
        attempt=attempt,
        proof=proof,
        snapshot_notes=snapshots.notes,
    )
    opening_events.extend(notes)
    return Training(
        step=step,
        loader=steps.loader,
        guard=guard,
        digests=_build_digests(run.guard, step),
        stragglers=_build_straggler_watch(run.guard, comm),
        step_range=steps.step_range,
        saver=saver,
        evaluator=evaluator,
        save_at_end=run.save.at_end,
        run_folder=run_folder,
        peak_lr=run.optim.lr,
        on_phase=attempt.status.on_phase if attempt else None,
        snapshots=snapshots.taker,
        files={
            "run.toml": dump(run),
            "plan.json": step.model.plan.to_json() + "\n",
            **_model_file(run.model),
        },
        opening_events=tuple(opening_events),
    )


def _opening_notes(
    run: Run,
    steps: RunSteps,
    *,
    attempt: Attempt | None,
    proof: Mapping[str, Any] | None,
    snapshot_notes: Iterable[Event],
) -> Iterator[Event]:
    """Notes before the first step: groups of the optimizer, texts that are cut, an elastic mesh,
    snapshots, the proof.
    """
    group_notes = optimizer_group_notes(steps.step, run.optim)
    if not steps.start.num_done:
        yield from group_notes
    truncation = truncation_note(steps.samples.facts(), seq_len=run.data.seq_len)
    if truncation is not None and not is_restart(attempt):
        yield {
            **note_event(truncation),
            "kind": "truncation",
        }
    if run.run.full_mesh:
        text = elastic_note(run.device_mesh, Mesh.parse(run.run.full_mesh))
        yield {
            **note_event(text),
            "kind": "elastic",
            "mesh": run.mesh,
        }
    yield from snapshot_notes
    if proof:
        yield proof_event(proof)


def _build_evaluator(
    config: EvalConfig,
    steps: RunSteps,
    validation: Samples,
    *,
    run_folder: Path,
    saves_best: bool,
) -> Evaluator:
    """The evaluations of a run on validation data, with the results that its folder records; every
    rank must call it.
    """
    if steps.references is not None:
        validation = steps.references.add_to(validation, name="valid")
    evaluation = Evaluation(
        steps.step.model,
        replace(steps.loader, samples=validation),
        most_batches=config.batches,
    )
    history = recorded_history(
        steps.step.model.comm,
        run_folder,
        start=steps.start.num_done,
        patience=config.patience,
    )
    return Evaluator(
        evaluation=evaluation,
        every=config.every,
        total_steps=steps.step_range.total,
        history=history,
        saves_best=saves_best,
    )


def is_restart(attempt: Attempt | None) -> bool:
    """Whether ranks were started again, and the events of the start are recorded."""
    return attempt is not None and attempt.restart is not None and attempt.restart.had_started


def _model_file(model: ModelSection) -> dict[str, str]:
    """A copy of the model file of a user."""
    text: str | None = getattr(FAMILIES[model.name], "text", None)
    if text is None:
        return {}
    return {"model.py": text}


def _start_events(
    steps: RunSteps,
    new_run: Event,
    *,
    resumes: bool,
    set_aside_paths: Sequence[Path],
    attempt: Attempt | None,
) -> list[Event]:
    """What events.jsonl says of the start: a restart, or the run itself and what it resumes.

    Args:
        new_run: the `run` event.
        resumes: whether the config names a checkpoint.
    """
    start = steps.start
    step_range = steps.step_range
    events: list[Event] = []
    restart = attempt.restart if attempt else None
    if restart is not None:
        events.append(start.restart_event(restart, num_steps=step_range.total))
    if restart is None or not restart.had_started:
        events.append({**new_run, "start_step": start.num_done})
        if resumes:
            events.append(start.resume_event())
        events.extend(opening_notes(set_aside_paths, step_range))
    return events


def _separate_ranks(
    comm: Comm,
    run_folder: Path,
    *,
    attempt: Attempt | None,
) -> tuple[int, ...]:
    """Ranks that do not share the run folder with rank 0; every rank must call it."""
    if attempt is not None and attempt.has_launcher:
        return ()
    return ranks_without_folder(comm, run_folder)


def _open_remote(
    save: SaveConfig,
    comm: Comm,
    run_folder: Path,
    *,
    num_done: int,
) -> RemoteCopies | None:
    """On rank 0 the copies of checkpoints at `save.remote`; every rank must call it.

    Raises:
        CheckpointError: on all ranks, if the URL cannot be written.
    """
    url = save.remote
    if url is None:
        return None
    opened: list[RemoteCopies] = []

    def open_on_rank_0() -> None:
        if comm.rank == 0:
            opened.append(
                RemoteCopies(
                    url,
                    run_folder,
                    keep=save.keep,
                    num_done=num_done,
                )
            )

    raise_on_all_ranks(comm, open_on_rank_0)
    return opened[0] if opened else None


@dataclass(frozen=True)
class _Snapshots:
    """Takes snapshots in memory, or None; and notes for the reader."""

    taker: MemorySnapshots | None = None
    notes: tuple[Event, ...] = ()


def _build_snapshots(
    steps: RunSteps,
    attempt: Attempt,
    *,
    facts: Callable[[int], Facts],
    every: int | None,
) -> _Snapshots:
    """Snapshots in memory, if there is room for them, without those of later steps; every rank must
    call it.
    """
    if attempt.node:
        return _build_node_snapshots(steps, attempt, facts=facts, every=every)
    step = steps.step
    comm = step.model.comm
    folder = attempt.memory_folder
    if folder is None:
        return _Snapshots()
    if comm.rank == 0:
        clean(folder, above=steps.start.num_done)
    problem = room_problem(comm, folder, step.state())
    if problem:
        return _no_snapshots(problem if every else "")
    taker = snapshots_in_folder(
        comm,
        folder,
        state=step.state,
        facts=facts,
        every=every,
    )
    return _Snapshots(taker)


def _build_node_snapshots(
    steps: RunSteps,
    attempt: Attempt,
    *,
    facts: Callable[[int], Facts],
    every: int | None,
) -> _Snapshots:
    """Snapshots in the memory of several nodes, as `_build_snapshots`."""
    step = steps.step
    comm = step.model.comm
    memory = NodeMemory.of(comm, attempt.memory_folder, attempt.node)
    if memory is None or not every:
        return _no_snapshots("a node has no private folder in memory" if every else "")
    clean_node(comm, memory, above=steps.start.num_done)
    problem = room_problem(comm, memory.folder, step.state())
    if problem:
        return _no_snapshots(problem)
    taker = snapshots_on_nodes(
        comm,
        memory,
        state=step.state,
        facts=facts,
        every=every,
    )
    if not memory.problem:
        return _Snapshots(taker)
    note = note_event(f"warning: save.memory_every: {memory.problem}")
    return _Snapshots(taker, (note,))


def _no_snapshots(problem: str) -> _Snapshots:
    """No snapshots, and a warning if there is a problem to report."""
    if not problem:
        return _Snapshots()
    note = note_event(f"warning: save.memory_every: no snapshots in memory: {problem}")
    return _Snapshots(notes=(note,))


def _build_guard(
    config: GuardConfig,
    steps: RunSteps,
    *,
    run_folder: Path,
) -> StepGuard:
    """The guard of this run's steps, with what its run folder records; every rank must call it."""
    start = steps.start
    comm = steps.step.model.comm
    next_batch = batch_of_step(start.num_done, start.guard.skipped_batches)
    local: dict[str, Any] = {}
    if comm.rank == 0:
        left_out = left_out_batches(read_records(run_folder), first=next_batch)
        has_checkpoint = next(checkpoints(run_folder), None) is not None
        local = {"left_out": left_out, "has_checkpoint": has_checkpoint}
    found = json.loads(broadcast_text(comm, json.dumps(local)))
    return StepGuard(
        config,
        steps.loader,
        comm.mesh,
        state=start.guard.without_batches(found["left_out"]),
        restore=partial(restore_newest, steps.step, run_folder),
        needs_first_save=not found["has_checkpoint"],
        record_folder=run_folder / GUARD_FOLDER if comm.rank == 0 else None,
        start={"start_step": start.num_done, "checkpoint": start.path},
    )


def _build_digests(config: GuardConfig, step: TrainStep) -> StateDigests | None:
    """The digests of the training state; None where the run has none."""
    if not config.digest_every:
        return None
    return StateDigests(step.state(), every=config.digest_every)


def _build_straggler_watch(config: GuardConfig, comm: Comm) -> StragglerWatch | None:
    """None where no rank has equals, or waits are on the device, where the host does not see them."""
    num_stages = comm.degree(pipeline_axis())
    has_equals = comm.mesh.size > num_stages
    waits_on_host = comm.device.type == "cpu"
    if config.stragglers and has_equals and waits_on_host:
        return StragglerWatch(comm, factor=config.stragglers)
    return None


def _clean_folder(
    run_folder: Path,
    comm: Comm,
    *,
    above: int,
) -> tuple[Path, ...]:
    """Remove leftovers and set later checkpoints aside (on rank 0); returns the renamed ones. Every
    rank must call it.
    """
    renamed: tuple[Path, ...] = ()
    if comm.rank == 0:
        remove_leftovers(run_folder)
        renamed = set_aside(run_folder, above=above)
    comm.barrier_world()
    return renamed
