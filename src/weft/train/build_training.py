"""The run config unpacked for training: groups of ranks, the step, all steps and the training run of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.checkpoint.resume import AUTO
from weft.checkpoint.saver import Saver
from weft.comm.comm import Comm
from weft.comm.group import StepGroups
from weft.comm.text import broadcast_text
from weft.config.run import Run, plan_of
from weft.config.toml import dump
from weft.core.model_config import AxisTable
from weft.data.dataset import open_data, open_validation
from weft.data.samples import Samples
from weft.models import Family
from weft.models.code_of_run import code_of_run
from weft.models.common.preference import with_preference_loss
from weft.models.common.score_losses import REWARD, with_score_loss
from weft.parallel.context.attend import whole_sequence_attentions
from weft.parallel.ep import AXIS as EP
from weft.run.world import Attempt
from weft.train.block_stats import BlockStats
from weft.train.build import (
    RunSteps,
    StepConfig,
    build_configured_step,
    build_data_loader,
    build_step_range,
    family_of,
    fixed_order_of,
    folder_of_references,
    initial_source,
    outer_settings,
)
from weft.train.reference_logprobs import References
from weft.train.resumed_rate import rate_events
from weft.train.run_records import (
    facts_of,
    optimizer_group_notes,
    optimizer_text,
    proof_event,
    run_event,
)
from weft.train.run_start import find_start
from weft.train.size_limits import OWN_LIMITS, SizeLimits
from weft.train.step import TrainStep
from weft.train.step_check import ProofRecord
from weft.train.step_phases import report_blocks
from weft.train.training import Training
from weft.train.training_parts import (
    Snapshots,
    build_digests,
    build_evaluator,
    build_guard,
    build_snapshots,
    build_straggler_watch,
    clean_folder,
    code_files,
    elastic_events,
    epoch_events,
    is_restart,
    open_remote,
    separate_ranks,
    start_events,
    truncation_events,
)

DPO = "dpo"


def step_groups(run: Run) -> StepGroups:
    """Which groups of ranks the steps of a run use."""
    axes: AxisTable = {}
    if run.device_mesh.degree(EP) > 1:  # they matter to the gradients of experts alone
        axes = family_of(run.model, run.lora).axes(run.model)
    return StepGroups.of(zero=run.parallel.zero, axes=axes)


def loss_family(run: Run) -> Family:
    """The family of a run's model, with its adapters, its noise and its loss."""
    family = family_of(run.model, run.lora, neftune=run.neftune, precision=run.precision)
    if run.loss == DPO:
        return with_preference_loss(family, run.dpo)
    return with_score_loss(family, run.loss)


def step_config(run: Run) -> StepConfig:
    """What the training step of a run is built from. Where the run resumes, its initial values are
    drawn, and meant to be replaced.
    """
    if run.resume is None:
        source = initial_source(run.model, base=run.lora.base)
    else:
        source = None
    return StepConfig(
        family=loss_family(run),
        model=run.model,
        optim=run.optim,
        seed=run.seed,
        source=source,
        fixed_order=run.deterministic,
        outer=outer_settings(run.site),
        has_rewards=run.loss in (DPO, REWARD),
        estimates_kl=run.loss == DPO and run.dpo.has_labels,
    )


def build_step(run: Run, comm: Comm, *, limits: SizeLimits = OWN_LIMITS) -> TrainStep:
    """The training step of a run on this rank; see `step_config` for its parameters."""
    plan = plan_of(run).model_copy(update={"bucket_bytes": limits.bucket_bytes})
    step = build_configured_step(step_config(run), plan, comm)
    for attention in whole_sequence_attentions(step.model.blocks.values()):
        attention.limits = limits.attention
    return step


def build_run_steps(
    run: Run,
    comm: Comm,
    *,
    attempt: Attempt | None = None,
    samples: Samples | None = None,
    writes_references: bool = False,
    limits: SizeLimits = OWN_LIMITS,
) -> RunSteps:
    """The steps of a run on this rank, initialised, or restored from the checkpoint that `resume`
    means or after a restart from the newest snapshot or checkpoint; every rank must call it.

    Args:
        samples: the opened data; default: that of the run.
        writes_references: whether reference log-probabilities of preference pairs, which a new run
            computes, are stored in its folder.

    Raises:
        CheckpointError: the checkpoints that `resume` means are not valid, or of another run; the
            same on all ranks.
        DataError: the data is not what the checkpoint was trained on.
    """
    if samples is None:
        samples = open_data(run.data, run.model)
    start = find_start(comm, out=run.out, resume=run.resume, attempt=attempt)
    start.check_data(samples)
    if start.checkpoint is None:
        resume = None
    else:
        resume = run.resume or AUTO
    step = build_step(run.with_values({"resume": resume}), comm, limits=limits)
    start.restore(step, run.optim.model_dump(mode="json"))
    load = partial(
        build_data_loader,
        comm=comm,
        batch=run.batch,
        seed=run.seed,
        later=run.model.reads_later_targets,
        fixed_order=fixed_order_of(run.parallel, deterministic=run.deterministic),
    )
    references: References | None = None
    if run.loss == DPO and run.dpo.has_reference:
        references = References(
            model=step.model,
            load=load,
            run_folder=Path(run.out or ""),
            source_folder=folder_of_references(start, Path(run.out or "")),
            is_initial=start.checkpoint is None or start.is_import,
            is_written=writes_references,
        )
        samples = references.add_to(samples, name="train")
    loader = load(samples)
    step_range = build_step_range(
        run.optim, start=start.num_done, total=run.steps, prefetch=run.data.prefetch
    )
    return RunSteps(
        samples=samples,
        step=step,
        start=start,
        loader=loader,
        step_range=step_range,
        references=references,
    )


def build_training(
    run: Run,
    comm: Comm,
    *,
    stop_requested: Callable[[], bool],
    attempt: Attempt | None = None,
    samples: Samples | None = None,
    proof: ProofRecord | None = None,
    makes_copies: bool = False,
    limits: SizeLimits = OWN_LIMITS,
) -> Training:
    """The training run of this rank, initialised or restored from the checkpoint that `resume`
    means; every rank calls it.

    Args:
        attempt: of a supervised rank: its status, where it takes snapshots, and why it was started
            again; then it resumes from the newest snapshot or checkpoint.
        samples: the opened data; default: that of the run.
        proof: verdicts, for the records of the run.
        makes_copies: whether checkpoints are copied to `save.remote`; what only repeats a run leaves
            its URL alone.
        limits: sizes from which on tensors are handled another way.

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
        run, comm, attempt=attempt, samples=samples, writes_references=True, limits=limits
    )
    step = steps.step
    start = steps.start
    if attempt is not None:
        report_blocks(step.model.blocks, attempt.status.on_block)
    # Behind the restore, which reads these folders; before the first save, which may write the same names.
    set_aside_paths = clean_folder(run_folder, comm, above=start.num_done)
    guard = build_guard(run.guard, steps, run_folder=run_folder, optim=run.optim)
    config = run.model_dump(mode="json")
    facts = facts_of(
        run.model,
        config,
        step,
        steps.samples,
        guard=lambda: guard.state,
        code=partial(code_of_run, run.model.name, run.optim.name),
        proof=proof,
    )
    snapshots = Snapshots()
    if attempt is not None:
        snapshots = build_snapshots(steps, attempt, facts=facts, every=run.save.memory_every)
    remote = None
    if makes_copies:
        remote = open_remote(run.save, comm, run_folder, num_done=start.num_done)
    saver = Saver(
        comm,
        run_folder,
        state=lambda: replace(step.state(), min_shared_entries=limits.shared_entries),
        facts=facts,
        every=run.save.every,
        keep=run.save.keep,
        stop_requested=stop_requested,
        last_saved=start.num_saved_in(run_folder),
        separate=separate_ranks(comm, run_folder, attempt=attempt),
        remote=remote,
    )
    evaluator = None
    if run.eval.every:
        evaluator = build_evaluator(
            run.eval,
            steps,
            open_validation(run.data, run.model, source=run.eval.source),
            run_folder=run_folder,
            saves_best=run.save.best,
        )
    optimizer = optimizer_text(run.optim, run.lora, run.model)
    opening_events = start_events(
        steps,
        run_event(config, step, steps.samples, kind=run.model.kind, optimizer=optimizer),
        resumes=run.resume is not None,
        set_aside_paths=set_aside_paths,
        attempt=attempt,
    )
    if not start.num_done:
        opening_events.extend(optimizer_group_notes(step, run.optim))
    elif start.checkpoint is not None and not is_restart(attempt):
        facts_at_start = start.checkpoint.manifest.facts
        opening_events.extend(rate_events(facts_at_start, run.optim, total=run.steps))
    if not is_restart(attempt):
        opening_events.extend(truncation_events(steps.samples, seq_len=run.data.seq_len))
        size = run.batch.global_size
        opening_events.extend(epoch_events(steps.samples, num_steps=run.steps, batch_size=size))
    opening_events.extend(elastic_events(run.mesh, run.run.full_mesh))
    opening_events.extend(snapshots.notes)
    if proof is not None and proof.before:
        opening_events.append(proof_event(proof.before))
    return Training(
        step=step,
        loader=steps.loader,
        guard=guard,
        digests=build_digests(run.guard, step),
        stragglers=build_straggler_watch(run.guard, comm),
        step_range=steps.step_range,
        saver=saver,
        evaluator=evaluator,
        save_at_end=run.save.at_end,
        save_wait_s=run.save.wait_s,
        gc_every=run.run.gc_every,
        run_folder=run_folder,
        peak_lr=run.optim.lr,
        on_phase=attempt.status.on_phase if attempt else None,
        snapshots=snapshots.taker,
        files={
            "run.toml": dump(run),
            "plan.json": step.model.plan.to_json() + "\n",
            **code_files(run.model, run.optim),
        },
        opening_events=tuple(opening_events),
        blocks=BlockStats(step, run.log.blocks) if run.log.blocks else None,
    )
