"""Build the parts of a training run from its config: the only module of `train` that unpacks `Run`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from weft.checkpoint.folder import checkpoints, remove_leftovers, set_aside
from weft.checkpoint.format import Facts
from weft.checkpoint.memory import MemorySnapshots, clean, room_problem
from weft.checkpoint.read import Checkpoint, Source
from weft.checkpoint.restore import load_parameters, open_newest_valid
from weft.checkpoint.resume import AUTO, data_changes
from weft.checkpoint.saver import Saver
from weft.checkpoint.state import MODEL
from weft.checkpoint.transfer import ranks_without_folder
from weft.comm.comm import Comm
from weft.comm.text import broadcast_text
from weft.config.elastic import elastic_note
from weft.config.lora import adapted_linears
from weft.config.run import Run, plan_of
from weft.config.schema import BatchConfig, GuardConfig, LoraConfig, ModelSection, OptimConfig
from weft.config.toml import dump
from weft.core.dimension import pipeline_axis, position_axes, sequence_axes
from weft.core.mesh import Mesh
from weft.core.model_config import ModelConfig
from weft.data.dataset import open_data, open_validation
from weft.data.order import batch_of_step
from weft.data.samples import Samples
from weft.errors import CheckpointError, DataError, Fault, GuardError, counted
from weft.hf.folder import HfFolder
from weft.layout.explain import explain
from weft.layout.plan import Plan
from weft.models import FAMILIES, Family
from weft.models.common.batch import image_example
from weft.models.common.lora import adapted
from weft.parallel.model.parallelize import ParallelModel, materialize_params, parallelize
from weft.run.world import Attempt, Restart
from weft.train.data_loader import DataLoader
from weft.train.digest import StateDigests
from weft.train.evaluate import Evaluation
from weft.train.guard import Restored, StepGuard
from weft.train.guard_records import FOLDER as GUARD_FOLDER
from weft.train.guard_records import GuardState, left_out_batches, read_records
from weft.train.init_from import check_hf_folder, initialize_from, lazy_blocks, lora_base
from weft.train.loop import Evaluator, Event, StepRange, Training
from weft.train.optim import Optimizer, learning_rate, make_optimizer, matrices
from weft.train.step import TrainStep, report_blocks
from weft.train.straggler import StragglerWatch

# Note [There is no random state]
# Starting values are drawn from (seed, parameter), the order of the data from (seed, step), what a model generates from
# (seed, position). No generator advances during training, so there is no generator state to save: the number of finished
# steps is the whole position. The facts in a checkpoint's manifest are checked at a resume, not restored.


def build_model(
    family: Family,
    config: ModelConfig,
    plan: Plan,
    comm: Comm,
    *,
    seed: int,
    source: Source | None = None,
) -> ParallelModel:
    """This rank's shards of the model; the whole model is never in memory.

    Parameters have their initial values, except under ZeRO 3: there `model.materialize` initialises
    them block by block.

    Args:
        source: holds initial values; parameters that it does not hold are drawn.
    """
    blocks = lazy_blocks(family, config)
    example = (
        image_example(plan.micro_size, config.model_dump()["image_size"])
        if config.kind == "images"
        else None
    )
    model = parallelize(
        blocks,
        plan,
        comm,
        axes=family.AXES,
        ties=family.ties(config),
        example=example,
    )
    dtype: torch.dtype = getattr(torch, plan.params)
    stored = frozenset(source.shapes) if source else frozenset()

    def initialize(names: Sequence[str]) -> None:
        drawn_names: list[str] = []
        stored_names: list[str] = []
        for name in names:
            is_stored = model.shards[name].owner in stored
            (stored_names if is_stored else drawn_names).append(name)
        materialize_params(
            model,
            family.init(config),
            seed=seed,
            device=comm.device,
            dtype=dtype,
            names=drawn_names,
        )
        if source:
            initialize_from(
                source,
                model,
                stored_names,
                device=comm.device,
                dtype=dtype,
            )

    if plan.zero < 3:
        initialize(tuple(model.params))
    return replace(model, materialize=initialize)


def family_of(model: ModelSection, lora: LoraConfig) -> Family:
    """The family of a model, with its adapters, if any."""
    return adapted(FAMILIES[model.name], lora)


def check_initial_parameters(model: ModelSection) -> None:
    """Check the Hugging Face folder that a new run starts from, in one process, before ranks start.

    Raises:
        CheckpointError: with every tensor of another shape than the model's.
    """
    if model.from_hf is not None:
        check_hf_folder(Path(model.from_hf), FAMILIES[model.name], model)


def initial_source(model: ModelSection, *, base: str | None) -> Source | None:
    """Where a new run reads initial values; None if they are drawn.

    Args:
        base: run or checkpoint with the parameters that adapters extend (`lora.base`).

    Raises:
        CheckpointError: the source does not hold this model.
    """
    if base is not None:
        return lora_base(base)
    if model.from_hf is not None:
        return HfFolder(Path(model.from_hf), model)
    return None


def build_step(run: Run, comm: Comm) -> TrainStep:
    """The training step of this rank. Parameters have their initial values, unless the run resumes:
    then they are drawn, and meant to be replaced.
    """
    source = initial_source(run.model, base=run.lora.base) if run.resume is None else None
    model = build_model(
        family_of(run.model, run.lora),
        run.model,
        plan_of(run),
        comm,
        seed=run.seed,
        source=source,
    )
    decay_names = matrices(model.params)

    def optimizer(tensors: Mapping[str, Tensor]) -> Optimizer:
        return make_optimizer(tensors, run.optim, decay_names=decay_names)

    return TrainStep(model, make_optimizer=optimizer, clip=run.optim.clip)


def build_data_loader(
    samples: Samples,
    comm: Comm,
    batch: BatchConfig,
    *,
    seed: int,
    later: bool,
) -> DataLoader:
    """The loader of this rank's micro-batches.

    Args:
        later: whether the model also reads targets of later positions (multi-token prediction).
    """
    return DataLoader(
        samples,
        global_size=batch.global_size,
        micro_size=batch.micro_size,
        seed=seed,
        index=comm.index(sequence_axes()),
        degree=comm.degree(sequence_axes()),
        device=comm.device,
        later=later,
        context_index=comm.index(position_axes()),
        context_degree=comm.degree(position_axes()),
    )


def build_step_range(
    optim: OptimConfig,
    *,
    start: int = 0,
    total: int,
    prefetch: int,
) -> StepRange:
    """Steps, learning rates and prefetching of a run of `total` steps that has done `start`."""
    return StepRange(
        start=start,
        total=total,
        learning_rate=partial(learning_rate, optim=optim, total_steps=total),
        prefetch=prefetch,
    )


def build_training(
    run: Run,
    comm: Comm,
    *,
    stop_requested: Callable[[], bool],
    attempt: Attempt | None = None,
) -> Training:
    """The training run of this rank, initialised or restored from the checkpoint that `resume`
    means; every rank calls it.

    Args:
        attempt: of a supervised rank: its status, where it takes snapshots, and why it was started
            again; then it resumes from the newest snapshot or checkpoint.

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
    samples = open_data(run.data, run.model)
    start = start_of(run, comm, samples, attempt=attempt)
    step = start.step
    if attempt is not None:
        report_blocks(step.model.blocks, attempt.status.on_block)
    set_aside_paths = _clean_folder(run_folder, comm, above=start.num_done)
    load = partial(
        build_data_loader,
        comm=comm,
        batch=run.batch,
        seed=run.seed,
        later=run.model.reads_later_targets,
    )
    loader = load(samples)
    guard = _build_guard(
        run.guard,
        start,
        loader,
        run_folder=run_folder,
    )
    facts = facts_of(run, step, samples, guard=lambda: guard.state)
    snapshots = _Snapshots()
    if attempt is not None and attempt.memory_folder is not None:
        if comm.rank == 0:
            clean(attempt.memory_folder, above=start.num_done)
        snapshots = _build_snapshots(
            step,
            attempt.memory_folder,
            facts=facts,
            every=run.save.memory_every,
        )
    saver = Saver(
        comm,
        run_folder,
        state=step.state,
        facts=facts,
        every=run.save.every,
        keep=run.save.keep,
        stop_requested=stop_requested,
        last_saved=start.num_done,
        separate=() if attempt is not None else ranks_without_folder(comm, run_folder),
    )
    evaluator = None
    if run.eval.every:
        validation = open_validation(run.data, run.model, source=run.eval.source)
        evaluation = Evaluation(
            step.model,
            load(validation),
            most_batches=run.eval.batches,
        )
        evaluator = Evaluator(evaluation, run.eval.every, run.steps)
    step_range = build_step_range(
        run.optim,
        start=start.num_done,
        total=run.steps,
        prefetch=run.data.prefetch,
    )
    opening_events: list[Event] = []
    restart = attempt.restart if attempt else None
    if restart is not None:
        opening_events.append(start.restart_event(restart, num_steps=run.steps))
    if restart is None or not restart.had_started:
        opening_events.append({**_run_event(run, step, samples), "start_step": start.num_done})
        if run.resume is not None:
            opening_events.append(start.resume_event())
        opening_events.extend(_opening_notes(set_aside_paths, step_range))
    if run.run.full_mesh:
        text = elastic_note(run.device_mesh, Mesh.parse(run.run.full_mesh))
        opening_events.append({**_note(text), "kind": "elastic", "mesh": run.mesh})
    opening_events.extend(snapshots.notes)
    return Training(
        step=step,
        loader=loader,
        guard=guard,
        digests=_build_digests(run.guard, step),
        stragglers=_build_straggler_watch(run.guard, comm),
        step_range=step_range,
        saver=saver,
        evaluator=evaluator,
        save_at_end=run.save.at_end,
        run_folder=run_folder,
        peak_lr=run.optim.lr,
        on_phase=attempt.status.on_phase if attempt else None,
        snapshots=snapshots.taker,
        files={"run.toml": dump(run), "plan.json": step.model.plan.to_json() + "\n"},
        opening_events=tuple(opening_events),
    )


@dataclass(frozen=True)
class _Snapshots:
    """Takes snapshots in memory, or None; and notes for the reader."""

    taker: MemorySnapshots | None = None
    notes: tuple[Event, ...] = ()


def _build_snapshots(
    step: TrainStep,
    folder: Path,
    *,
    facts: Callable[[int], Facts],
    every: int | None,
) -> _Snapshots:
    """Snapshots in memory, if there is room for them; every rank must call it."""
    comm = step.model.comm
    problem = room_problem(comm, folder, step.state())
    if problem and every:
        note = _note(f"warning: save.memory_every: no snapshots in memory: {problem}")
        return _Snapshots(notes=(note,))
    if problem:
        return _Snapshots()
    taker = MemorySnapshots(
        comm,
        folder,
        state=step.state,
        facts=facts,
        every=every,
    )
    return _Snapshots(taker)


StateSource = Literal["memory", "checkpoint", "start"]


@dataclass(frozen=True)
class RunStart:
    """Where a run starts.

    Attributes:
        checkpoint: None: initial parameters.
        passed_over: newer checkpoints that are damaged, and how.
        source: of the state, where ranks were started again.
    """

    step: TrainStep
    checkpoint: Checkpoint | None = None
    passed_over: tuple[str, ...] = ()
    source: StateSource = "start"

    @property
    def guard(self) -> GuardState:
        """What the guards of the run remember."""
        if self.checkpoint is None:
            return GuardState()
        return GuardState.of_position(self.checkpoint.manifest.facts.position)

    @property
    def path(self) -> str | None:
        """The folder of the checkpoint."""
        return str(self.checkpoint.path) if self.checkpoint else None

    @property
    def num_done(self) -> int:
        """Optimizer steps that are done."""
        return self.checkpoint.manifest.facts.step if self.checkpoint else 0

    @property
    def is_import(self) -> bool:
        """Whether the checkpoint is an imported model, which has parameters only."""
        return self.checkpoint is not None and not self.checkpoint.manifest.facts.plan

    @property
    def layout(self) -> str:
        """The layout that wrote the checkpoint, as text."""
        if self.checkpoint is None:
            return ""
        if self.is_import:
            return "an import"
        return str(self.checkpoint.manifest.facts.plan["mesh"]) or "one rank"

    def restore(self) -> None:
        """Load the checkpoint, if any, into the step; of an import the parameters only. Every rank
        must call it.
        """
        if self.checkpoint is None:
            return
        if self.is_import:
            load_parameters(self.step.state(), self.checkpoint.section(MODEL))
        else:
            self.step.restore(self.checkpoint)

    def resume_event(self) -> Event:
        """The `resume` event of events.jsonl."""
        return {
            "event": "resume",
            "step": self.num_done,
            "path": self.path,
            "layout": self.layout,
            "passed_over": list(self.passed_over),
        }

    def restart_event(self, restart: Restart, *, num_steps: int) -> Event:
        """The `restart` event of events.jsonl, of a run of `num_steps`."""
        return {
            "event": "restart",
            "attempt": restart.number,
            "of": restart.most,
            "step": self.num_done,
            "steps": num_steps,
            "source": self.source,
            "rank": restart.rank,
            "reason": restart.reason,
            "detected_s": restart.detected_s,
            "recovered_s": time.monotonic() - restart.at_s,
        }


@dataclass(frozen=True)
class _StateFolder:
    """A folder with states of a run."""

    newest_step: int
    source: StateSource
    path: Path


def _state_folders(run_folder: Path, attempt: Attempt) -> list[_StateFolder]:
    """Where a run that is started again finds its state, the newest first. No rank writes now."""
    folders: list[_StateFolder] = []
    candidates: list[tuple[StateSource, Path]] = []
    if attempt.memory_folder is not None:
        candidates.append(("memory", attempt.memory_folder))
    if attempt.restart is not None and attempt.restart.had_started:
        candidates.append(("checkpoint", run_folder))
    for source, folder in candidates:
        newest = next(checkpoints(folder), None)
        if newest is not None:
            folders.append(_StateFolder(newest[0], source, folder))
    folders.sort(key=lambda folder: folder.newest_step, reverse=True)
    return folders


def start_of(run: Run, comm: Comm, samples: Samples, *, attempt: Attempt | None = None) -> RunStart:
    """The training step, restored from the checkpoint that `resume` means, if there is one, or
    after a restart from the newest snapshot or checkpoint; every rank must call it.

    Raises:
        DataError: the data is not what the checkpoint was trained on.
    """
    checkpoint: Checkpoint | None = None
    faults: Sequence[Fault] = ()
    source: StateSource = "start"
    if attempt is not None and attempt.restart is not None:
        for folder in _state_folders(Path(run.out or ""), attempt):
            try:
                checkpoint, faults = open_newest_valid(str(folder.path), None, comm)
            except CheckpointError:  # on all ranks: no state there is valid
                continue
            if checkpoint is not None:
                source = folder.source
                break
    if checkpoint is None and run.resume is not None:
        checkpoint, faults = open_newest_valid(run.resume, run.out, comm)
    if checkpoint is None:
        return RunStart(build_step(run.with_values({"resume": None}), comm))
    changes = tuple(data_changes(checkpoint.manifest.facts.data, samples.facts()))
    if changes:
        raise DataError(*changes)
    step = build_step(run.with_values({"resume": run.resume or AUTO}), comm)
    passed_over = tuple(str(fault) for fault in faults)
    start = RunStart(
        step,
        checkpoint,
        passed_over,
        source,
    )
    start.restore()
    return start


def _build_guard(
    config: GuardConfig,
    start: RunStart,
    loader: DataLoader,
    *,
    run_folder: Path,
) -> StepGuard:
    """The guard of this run's steps, with what its run folder records; every rank must call it."""
    comm = start.step.model.comm
    next_batch = batch_of_step(start.num_done, start.guard.skipped_batches)
    local: dict[str, Any] = {}
    if comm.rank == 0:
        left_out = left_out_batches(read_records(run_folder), first=next_batch)
        has_checkpoint = next(checkpoints(run_folder), None) is not None
        local = {"left_out": left_out, "has_checkpoint": has_checkpoint}
    found = json.loads(broadcast_text(comm, json.dumps(local)))
    return StepGuard(
        config,
        loader,
        comm.mesh,
        state=start.guard.without_batches(found["left_out"]),
        restore=partial(restore_newest, start.step, run_folder),
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
    has_equals = comm.mesh.size > comm.degree(pipeline_axis())
    if not config.stragglers or not has_equals or comm.device.type != "cpu":
        return None
    return StragglerWatch(comm, factor=config.stragglers)


def restore_newest(step: TrainStep, run_folder: Path) -> Restored:
    """Load the newest valid checkpoint of the run folder into a training step; every rank must call
    it.

    Raises:
        CheckpointError: no checkpoint is valid.
        GuardError: there is none.
    """
    checkpoint, faults = open_newest_valid(AUTO, str(run_folder), step.model.comm)
    if checkpoint is None:
        raise GuardError(f"there is no checkpoint in {run_folder} to go back to")
    start = RunStart(step, checkpoint, tuple(str(fault) for fault in faults))
    start.restore()
    if start.is_import:
        step.reset_optimizer()
    return Restored(
        start.num_done,
        str(checkpoint.path),
        start.guard,
        start.resume_event(),
    )


def _clean_folder(run_folder: Path, comm: Comm, *, above: int) -> tuple[Path, ...]:
    """Remove leftovers and set later checkpoints aside (on rank 0); returns the renamed ones. Every
    rank must call it.
    """
    renamed: tuple[Path, ...] = ()
    if comm.rank == 0:
        remove_leftovers(run_folder)
        renamed = set_aside(run_folder, above=above)
    comm.barrier_world()
    return renamed


def facts_of(
    run: Run,
    step: TrainStep,
    samples: Samples,
    *,
    guard: Callable[[], GuardState] = GuardState,
) -> Callable[[int], Facts]:
    """Returns the facts of a checkpoint's manifest after a number of steps; see Note [There is no
    random state].
    """
    plan = step.model.plan.model_dump(mode="json")
    data = samples.facts()

    def facts_after(num_steps: int) -> Facts:
        scale = step.loss_scale
        loss_scale = (
            {"value": scale.value, "good_steps": scale.good_steps} if scale.is_dynamic else None
        )
        return Facts(
            step=num_steps,
            seed=run.seed,
            family=run.model.name,
            architecture=run.model.architecture,
            plan=plan,
            run=run.model_dump(mode="json"),
            optimizer=run.optim.model_dump(mode="json"),
            data=data,
            position=guard().position(num_steps, global_size=run.batch.global_size),
            loss_scale=loss_scale,
        )

    return facts_after


def _opening_notes(set_aside_paths: Sequence[Path], step_range: StepRange) -> Iterator[Event]:
    for path in set_aside_paths:
        yield _note(f"a checkpoint of later steps is kept as {path}: these steps are trained again")
    if step_range.start >= step_range.total:
        steps = counted(step_range.total, "step")
        yield _note(f"all {steps} are done: to train more, raise --steps")


def _note(text: str) -> Event:
    return {"event": "note", "text": text}


def _run_event(run: Run, step: TrainStep, samples: Samples) -> dict[str, Any]:
    """The `run` event of events.jsonl: model, data and layout."""
    plan = step.model.plan
    return {
        "event": "run",
        "model": run.model.preset or run.model.name,
        "params": step.num_params,
        "layout": str(plan.mesh),
        "why": explain(plan),
        "schedule": _schedule_text(plan),
        "plan": plan.digest,
        "ranks": plan.mesh.size,
        "device": str(step.model.comm.device),
        "data": samples.facts(),
        "optimizer": _optimizer_text(run.optim, run.lora, run.model),
        "seed": run.seed,
        "steps": run.steps,
        "seq_len": run.data.seq_len,
        "batch_size": run.batch.global_size,
        "out": run.out,
    }


def _optimizer_text(optim: OptimConfig, lora: LoraConfig, model: ModelConfig) -> str:
    warmup = counted(optim.warmup, "step")
    text = f"{optim.name}, lr {optim.lr:g} {optim.decay}, warm-up {warmup}"
    if not lora.rank:
        return text
    num_linears = len(adapted_linears(lora.targets, model.linears()))
    linears = counted(num_linears, "linear")
    return f"{text}; trains only adapters of rank {lora.rank} on {linears}"


def _schedule_text(plan: Plan) -> str:
    """The pipeline schedule; "" without one."""
    if plan.pipeline_size == 1:
        return ""
    stages = counted(len(plan.stages), "stage")
    return f"{plan.schedule}, {stages}, bubble {100 * plan.bubble:.0f}% (predicted)"
