"""Parts of the training run of one rank, built from its steps: guard, snapshots, evaluation, first events."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from weft.checkpoint.folder import checkpoints, remove_leftovers, set_aside
from weft.checkpoint.format import Facts
from weft.checkpoint.memory import MemorySnapshots, clean, room_problem, snapshots_in_folder
from weft.checkpoint.node_memory import NodeMemory, clean_node, snapshots_on_nodes
from weft.checkpoint.remote import RemoteCopies
from weft.checkpoint.transfer import ranks_without_folder
from weft.code.identity import CODE_FILE
from weft.comm.comm import Comm
from weft.comm.text import broadcast_text, raise_on_all_ranks
from weft.config.elastic import elastic_note
from weft.config.schema import EvalConfig, GuardConfig, ModelSection, OptimConfig, SaveConfig
from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.data.conversations import truncation_note
from weft.data.epochs import source_epochs
from weft.data.order import batch_of_step
from weft.data.samples import Samples
from weft.models import FAMILIES
from weft.models.code_of_run import code_of_run
from weft.run.world import Attempt
from weft.train.best import go_back, recorded_history
from weft.train.build import RunSteps
from weft.train.digest import StateDigests
from weft.train.evaluate import Evaluation
from weft.train.guard import StepGuard
from weft.train.guard_records import FOLDER as GUARD_FOLDER
from weft.train.guard_records import left_out_batches, read_records
from weft.train.run_records import note_event, opening_notes
from weft.train.run_start import restore_newest
from weft.train.step import TrainStep
from weft.train.straggler import StragglerWatch
from weft.train.training import Evaluator, Event


def truncation_events(samples: Samples, *, seq_len: int) -> Iterator[Event]:
    """A note on texts that are cut."""
    truncation = truncation_note(samples.facts(), seq_len=seq_len)
    if truncation is not None:
        yield {**note_event(truncation), "kind": "truncation"}


def epoch_events(samples: Samples, *, num_steps: int, batch_size: int) -> Iterator[Event]:
    """A note on each source that the run reads more than once."""
    for source in source_epochs(samples, num_read=num_steps * batch_size):
        if source.epochs > 1:
            yield {**note_event(source.note(num_steps)), "kind": "epochs", "epochs": source.epochs}


def elastic_events(mesh: str, full_mesh: str) -> Iterator[Event]:
    """A note on an elastic run on fewer ranks than its full mesh.

    Args:
        full_mesh: "" where the run is on its full mesh.
    """
    if full_mesh:
        text = elastic_note(Mesh.parse(mesh), Mesh.parse(full_mesh))
        yield {**note_event(text), "kind": "elastic", "mesh": mesh}


def build_evaluator(
    config: EvalConfig, steps: RunSteps, validation: Samples, *, run_folder: Path, saves_best: bool
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
        kl=steps.step.kl,
    )
    history = recorded_history(
        steps.step.model.comm, run_folder, start=steps.start.num_done, patience=config.patience
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


def code_files(model: ModelSection, optim: OptimConfig) -> dict[str, str]:
    """The identity of users' code, and a copy of a model file."""
    code = code_of_run(model.name, optim.name)
    files = {CODE_FILE: code.to_json()} if code.parts else {}
    text: str | None = getattr(FAMILIES[model.name], "text", None)
    if text is not None:
        files["model.py"] = text
    return files


def start_events(
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


def separate_ranks(comm: Comm, run_folder: Path, *, attempt: Attempt | None) -> tuple[int, ...]:
    """Ranks that do not share the run folder with rank 0; every rank must call it."""
    if attempt is not None and attempt.has_launcher:
        return ()
    return ranks_without_folder(comm, run_folder)


def open_remote(
    save: SaveConfig, comm: Comm, run_folder: Path, *, num_done: int
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
            opened.append(RemoteCopies(url, run_folder, keep=save.keep, num_done=num_done))

    raise_on_all_ranks(comm, open_on_rank_0)
    return opened[0] if opened else None


@dataclass(frozen=True)
class Snapshots:
    """Takes snapshots in memory, or None; and notes for the reader."""

    taker: MemorySnapshots | None = None
    notes: tuple[Event, ...] = ()


def build_snapshots(
    steps: RunSteps, attempt: Attempt, *, facts: Callable[[int], Facts], every: int | None
) -> Snapshots:
    """Snapshots in memory, if there is room for them, without those of later steps; every rank must
    call it.
    """
    if attempt.node:
        return _build_node_snapshots(steps, attempt, facts=facts, every=every)
    step = steps.step
    comm = step.model.comm
    folder = attempt.memory_folder
    if folder is None:
        return Snapshots()
    if comm.rank == 0:
        clean(folder, above=steps.start.num_done)
    problem = room_problem(comm, folder, step.state())
    if problem:
        return _no_snapshots(problem if every else "")
    taker = snapshots_in_folder(comm, folder, state=step.state, facts=facts, every=every)
    return Snapshots(taker)


def _build_node_snapshots(
    steps: RunSteps, attempt: Attempt, *, facts: Callable[[int], Facts], every: int | None
) -> Snapshots:
    """Snapshots in the memory of several nodes, as `build_snapshots`."""
    step = steps.step
    comm = step.model.comm
    memory = NodeMemory.of(comm, attempt.memory_folder, attempt.node)
    if memory is None or not every:
        return _no_snapshots("a node has no private folder in memory" if every else "")
    clean_node(comm, memory, above=steps.start.num_done)
    problem = room_problem(comm, memory.folder, step.state())
    if problem:
        return _no_snapshots(problem)
    taker = snapshots_on_nodes(comm, memory, state=step.state, facts=facts, every=every)
    if not memory.problem:
        return Snapshots(taker)
    note = note_event(f"warning: save.memory_every: {memory.problem}")
    return Snapshots(taker, (note,))


def _no_snapshots(problem: str) -> Snapshots:
    """No snapshots, and a warning if there is a problem to report."""
    if not problem:
        return Snapshots()
    note = note_event(f"warning: save.memory_every: no snapshots in memory: {problem}")
    return Snapshots(notes=(note,))


def build_guard(
    config: GuardConfig, steps: RunSteps, *, run_folder: Path, optim: OptimConfig
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
        restore=partial(restore_newest, steps.step, run_folder, optim.model_dump(mode="json")),
        needs_first_save=not found["has_checkpoint"],
        record_folder=run_folder / GUARD_FOLDER if comm.rank == 0 else None,
        start={"start_step": start.num_done, "checkpoint": start.path},
    )


def build_digests(config: GuardConfig, step: TrainStep) -> StateDigests | None:
    """The digests of the training state; None where the run has none."""
    if not config.digest_every:
        return None
    return StateDigests(step.state(), every=config.digest_every)


def build_straggler_watch(config: GuardConfig, comm: Comm) -> StragglerWatch | None:
    """None where no rank has equals, or waits are on the device, where the host does not see them."""
    num_stages = comm.degree(pipeline_axis())
    has_equals = comm.mesh.size > num_stages
    waits_on_host = comm.device.type == "cpu"
    if config.stragglers and has_equals and waits_on_host:
        return StragglerWatch(comm, factor=config.stragglers)
    return None


def clean_folder(run_folder: Path, comm: Comm, *, above: int) -> tuple[Path, ...]:
    """Remove leftovers, set later checkpoints aside, and forget a later best one (on rank 0); returns
    the renamed ones. Every rank must call it.
    """
    renamed: tuple[Path, ...] = ()
    if comm.rank == 0:
        remove_leftovers(run_folder)
        renamed = set_aside(run_folder, above=above)
        go_back(run_folder, start=above)
    comm.barrier_world()
    return renamed
