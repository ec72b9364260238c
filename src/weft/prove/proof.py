"""Prove a run: train its first steps on its layout, ranks as threads, and on one device; compare everything."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from weft.comm.comm import Comm
from weft.config.run import Run
from weft.config.schema import PrecisionConfig
from weft.core.axes import local_update_axis
from weft.data.dataset import open_data
from weft.data.samples import Samples
from weft.models import Family
from weft.prove.arithmetic import (
    PLAIN,
    NumberTypes,
    Perturbation,
    has_jumps,
    perturbations,
)
from weft.prove.bounds import FACTOR, TOLERANCE, Bounds
from weft.prove.failure import difference_of_error, error_text, is_fault_of_the_layout
from weft.prove.judge import Judge
from weft.prove.local_updates import SiteProof, inside_site, sites_note
from weft.prove.raw_batch import FirstSamples, MaskedSamples
from weft.prove.record import RankRecord
from weft.prove.recorder import Recorder
from weft.prove.reduce import in_float64
from weft.prove.reference import Reference
from weft.prove.report import Difference, Pass, ProofReport
from weft.prove.stored import record_stored
from weft.run.run_ranks import arithmetic_of_ranks, run_ranks
from weft.train.build import family_of, initial_source
from weft.train.build_training import build_training
from weft.train.evaluate import Evaluation, eval_event
from weft.train.event_log import EventLog
from weft.train.loop import run_training
from weft.train.training import Event

MUON_EPS = 2.0**-8
"""Unit of bfloat16, in which Muon orthogonalises."""
JUMPS_NOTE = "compared in float64 alone: updates of {} magnify rounding errors of float32"
TIMEOUT_S = 3600.0
STEPS_AFTER_RESUME = 1
DRAWN_SIGNS_SEED = 3
MAX_NOTES = 4


@dataclass(frozen=True)
class Subject:
    """What is proved.

    Attributes:
        run: the run, with the sizes that are compared.
        family: its model family, with adapters.
        samples: its data.
        steps: optimizer steps; the last one follows a checkpoint that is written and read back.
    """

    run: Run
    family: Family
    samples: Samples
    steps: int

    @staticmethod
    def of(
        run: Run,
        *,
        steps: int,
        samples: Samples | None = None,
    ) -> Subject:
        """The subject of a run, whose data is opened; some targets of token data are masked."""
        if samples is None:
            samples = open_data(run.data, run.model)
            if run.model.kind == "tokens":
                samples = MaskedSamples(samples)
        return Subject(run, family_of(run.model, run.lora), samples, steps)

    def in_float64(self) -> Subject:
        """The same in float64."""
        return replace(self, run=in_float64(self.run))

    def perturbations(self) -> Sequence[Perturbation]:
        """The perturbed versions of its reference, from which bounds are derived."""
        return perturbations(
            NumberTypes.of(self.run.precision),
            self.run.optim,
            micro_size=self.run.batch.micro_size,
        )


def prove(subject: Subject) -> ProofReport:
    """Compare the layout of a run with one device: in its own number types, and, where those have 16
    bits, in float64, too.

    Raises:
        UserError: what the run asks for is not possible.
    """
    with arithmetic_of_ranks():
        if local_update_axis(subject.run.device_mesh) is None:
            return _prove(subject)
        return _prove_sites(subject)


def _prove_sites(subject: Subject) -> ProofReport:
    """The layout inside a site, then the steps that join the sites. See `weft.prove.local_updates`."""
    start = time.perf_counter()
    run = subject.run
    inside = _prove(replace(subject, run=inside_site(run)))
    passes = inside.passes
    if inside.holds:
        outer = SiteProof.of(run, subject.family, subject.samples).compare()
        passes = (*passes, outer)
    return replace(
        inside,
        layout=layout_text(run),
        ranks=run.device_mesh.size,
        passes=passes,
        seconds=time.perf_counter() - start,
        notes=(*inside.notes, sites_note(run)),
    )


def _prove(subject: Subject) -> ProofReport:
    start = time.perf_counter()
    run = subject.run
    passes: list[Pass] = []
    notes: list[str] = []
    failed: _Failed | None = None
    subjects = [subject]
    types = NumberTypes.of(run.precision)
    unit = torch.finfo(torch.float32).eps
    if types.eps > unit:
        subjects.insert(0, subject.in_float64())
    elif not types.is_exact and has_jumps(run.optim):
        subjects = [subject.in_float64()]
        notes.append(JUMPS_NOTE.format(run.optim.name))
    for each in subjects:
        outcome = _prove_once(each)
        if isinstance(outcome, _Failed):
            failed = outcome
            break
        passes.append(outcome.result)
        notes.extend(outcome.notes)
        if outcome.result.differences:
            break
    return ProofReport(
        layout=layout_text(run),
        model=model_text(run),
        ranks=run.device_mesh.size,
        steps=subject.steps,
        passes=tuple(passes),
        error="" if failed is None else failed.text,
        failure=None if failed is None else failed.difference,
        seconds=time.perf_counter() - start,
        notes=tuple(dict.fromkeys(notes)),
    )


@dataclass(frozen=True)
class _Failed:
    """An error that ended the run of the layout."""

    text: str
    difference: Difference


@dataclass(frozen=True)
class _Outcome:
    result: Pass
    notes: tuple[str, ...]


def _prove_once(subject: Subject) -> _Outcome | _Failed:
    mesh = subject.run.device_mesh
    records = [RankRecord(rank) for rank in range(mesh.size)]
    try:
        run_layout(subject, records)
    except Exception as error:
        if not is_fault_of_the_layout(error, records):
            raise
        blocks = tuple(subject.family.blocks(subject.run.model))
        difference = difference_of_error(
            error,
            records,
            mesh=mesh,
            blocks=blocks,
        )
        return _Failed(error_text(error), difference)
    bounds = reference_bounds(subject, skipped=skipped_steps(records[0].events))
    judge = Judge(
        mesh,
        records,
        bounds,
        has_sharded_activations=subject.run.parallel.sequence,
    )
    differences = judge.compare()
    source = bounds_text(bounds.types, is_perturbed=bool(bounds.perturbed))
    return _Outcome(
        Pass(types_text(subject.run.precision), source, judge.found.phase_bounds(), differences),
        _notes(judge),
    )


def _notes(judge: Judge) -> tuple[str, ...]:
    if not judge.found.uncompared:
        return tuple(judge.found.notes)
    names = sorted(judge.found.uncompared)
    shown = ", ".join(names[:MAX_NOTES])
    more = f" and {len(names) - MAX_NOTES} more" if len(names) > MAX_NOTES else ""
    return (*judge.found.notes, f"not compared, of no known shape on a rank: {shown}{more}")


def run_layout(subject: Subject, records: Sequence[RankRecord]) -> None:
    """Train the steps on the layout as `weft train` does, save before the last one, resume from
    that checkpoint on the same ranks; what every rank computes is added to its record.
    """
    with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
        out = str(Path(folder) / "run")

        def rank(comm: Comm) -> None:
            record = records[comm.rank]
            try:
                _train_rank(subject, comm, record, out)
            except Exception as error:
                record.error = error
                raise

        run_ranks(
            subject.run.device_mesh,
            rank,
            timeout_s=TIMEOUT_S,
            takes_turns=True,
        )


def _train_rank(
    subject: Subject,
    comm: Comm,
    record: RankRecord,
    out: str,
) -> None:
    num_before = subject.steps - STEPS_AFTER_RESUME
    if num_before < 1:
        _train_part(
            subject,
            comm,
            record,
            out=out,
            resume=None,
            total=subject.steps,
            saves=False,
        )
        return
    _train_part(
        subject,
        comm,
        record,
        out=out,
        resume=None,
        total=num_before,
        saves=True,
    )
    record.resumed_after = num_before
    if comm.rank == 0:
        record_stored(record, Path(out), num_before)
    record.progress.is_restoring = True
    _train_part(
        subject,
        comm,
        record,
        out=out,
        resume="auto",
        total=subject.steps,
        saves=False,
    )


def _train_part(
    subject: Subject,
    comm: Comm,
    record: RankRecord,
    *,
    out: str,
    resume: str | None,
    total: int,
    saves: bool,
) -> None:
    """Train up to step `total`."""
    observers = comm.observers
    run = subject.run.with_values({"out": out, "resume": resume})
    training = build_training(
        run,
        comm,
        stop_requested=lambda: False,
        samples=subject.samples,
    )
    recorder = Recorder(record, training)
    training = recorder.attach(training)
    if resume is not None:
        recorder.record_state(
            training.step_range.start,
            moments="checkpoint",
            params="checkpoint",
        )
        record.progress.is_restoring = False
    step_range = replace(training.step_range, total=total)
    training = replace(
        training,
        step_range=step_range,
        save_at_end=saves,
        stragglers=None,
        evaluator=None,
        files={},
    )
    run_training(training, EventLog(None, [recorder]))
    if total == subject.steps:
        record.progress.phase = "evaluate"
        first = FirstSamples.of(subject.samples, global_size=run.batch.global_size)
        loader = replace(training.loader, samples=first)
        evaluation = Evaluation(
            training.step.model,
            loader,
            most_batches=0,
        )
        recorder.handle(eval_event(total, evaluation()))
    comm.observers = observers


def skipped_steps(events: Iterable[Event]) -> frozenset[int]:
    """The steps of a layout whose gradients overflowed."""
    found = set()
    for event in events:
        if event["event"] == "step" and event.get("skipped"):
            found.add(int(event["step"]))
    return frozenset(found)


def reference_bounds(subject: Subject, *, skipped: frozenset[int]) -> Bounds:
    """The one-device reference, and its perturbed versions for the bounds.

    Args:
        skipped: see `Reference`.
    """
    perturbed = []
    for perturbation in subject.perturbations():
        each = reference(
            subject,
            perturbation=perturbation,
            skipped=skipped,
        )
        perturbed.append(each.run_all(subject.steps))
    whole = reference(subject, skipped=skipped)
    has_zero_matrices = whole.has_zero_matrices
    bounds = Bounds(
        whole.run_all(subject.steps),
        tuple(perturbed),
        whole.types,
        update_eps=MUON_EPS if subject.run.optim.name == "muon" else 0.0,
    )
    if whole.types.is_exact or not has_zero_matrices:
        return bounds
    drawn = Perturbation(noise_seed=DRAWN_SIGNS_SEED, free_signs=bounds.small_gradient)
    with_drawn_signs = reference(
        subject,
        perturbation=drawn,
        skipped=skipped,
    )
    trace = with_drawn_signs.run_all(subject.steps)
    return replace(bounds, perturbed=(*perturbed, trace))


def reference(
    subject: Subject,
    *,
    perturbation: Perturbation = PLAIN,
    records: bool = True,
    skipped: frozenset[int] | None = None,
) -> Reference:
    """The one-device reference of a subject."""
    run = subject.run
    source = initial_source(run.model, base=run.lora.base)
    return Reference(
        run,
        subject.family,
        subject.samples,
        source=source,
        perturbation=perturbation,
        records=records,
        skipped=skipped,
    )


def layout_text(run: Run) -> str:
    """Mesh and options that differ from their defaults."""
    words = [str(run.device_mesh)]
    for section in ("parallel", "pipeline"):
        values = getattr(run, section)
        default = type(values)()
        for key in type(values).model_fields:
            value = getattr(values, key)
            is_content = key == "table"  # of the schedule file, which is named
            if value != getattr(default, key) and not is_content:
                words.append(f"{section}.{key} {value}")
    return ", ".join(words)


def model_text(run: Run) -> str:
    """Family, main sizes and batch."""
    sizes = run.model.architecture
    shown = [f"{key} {sizes[key]}" for key in ("layers", "dim", "vocab") if key in sizes]
    batch = f"batch {run.batch.global_size} x {run.data.seq_len}"
    if run.model.kind == "images":
        batch = f"batch {run.batch.global_size}"
    return f"{run.model.name} ({', '.join([*shown, batch])})"


def types_text(precision: PrecisionConfig) -> str:
    """Number types: "float32", or "bfloat16, parameters float32, sums float32"."""
    if precision.params == precision.compute == precision.reduce:
        return precision.compute
    return f"{precision.compute}, parameters {precision.params}, sums {precision.reduce}"


def bounds_text(types: NumberTypes, *, is_perturbed: bool = False) -> str:
    """Where the bounds come from.

    Args:
        is_perturbed: whether a run in float64 has perturbed versions.
    """
    noise = f"{FACTOR:g} times what rounding noise of one unit moves the same computation"
    if not types.is_exact:
        return noise
    return f"{TOLERANCE:.0e}, or {noise}" if is_perturbed else f"{TOLERANCE:.0e}"
