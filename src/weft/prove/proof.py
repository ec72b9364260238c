"""Prove a run: train its first steps on its layout, ranks as threads, and on one device; compare everything."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from weft.comm.comm import Comm
from weft.config.optimizers import uses_8_bits
from weft.core.axes import local_update_axis
from weft.prove.arithmetic import PLAIN, NumberTypes, Perturbation, has_jumps, magnifies_noise
from weft.prove.bounds import FACTOR, TOLERANCE, Bounds, wide_note
from weft.prove.failure import (
    difference_of_error,
    error_text,
    is_between_steps,
    is_fault_of_the_layout,
)
from weft.prove.judge import Judge
from weft.prove.local_updates import SiteProof, sites_note
from weft.prove.record import RankRecord
from weft.prove.reference import Reference
from weft.prove.relations import dtype_text
from weft.prove.report import Difference, Pass, ProofReport
from weft.prove.stored import record_stored
from weft.prove.subject import Subject
from weft.prove.trained_part import TrainedPart
from weft.run.run_ranks import arithmetic_of_ranks, run_ranks

MUON_EPS = 2.0**-8
"""Unit of bfloat16, in which Muon orthogonalises."""
JUMPS_NOTE = "compared in float64 alone: {} magnify rounding errors of other types"
INNER_NOTE = "{} casts to {}, whatever the types of the run: bounds are those of that type"
PAIRS_NOTE = "the preference pairs are drawn; --full compares those of the run"
LABELS_NOTE = "the labelled texts are drawn"
ENDED_NOTE = "after that the layout ended with an error: {}"
TIMEOUT_S = 3600.0
STEPS_AFTER_RESUME = 1
DRAWN_SIGNS_SEED = 3
MAX_NOTES = 4
MOST_EXCESS = 4.0
"""Times its bound, up to which a difference is compared again with bounds of more samples."""
MORE_SAMPLES = 3
MORE_SAMPLES_SEED = 100


class BoundsOf(Protocol):
    """Trains a run on one device: what its layout is compared with, and within which bounds."""

    def __call__(self, subject: Subject, *, skipped: frozenset[int]) -> Bounds:
        """The traces; `skipped` as of `Reference`."""
        ...


def prove(subject: Subject, *, bounds_of: BoundsOf | None = None) -> ProofReport:
    """Compare the layout of a run with one device: in its own number types, and, where those have 16
    bits, in float64, too.

    Args:
        bounds_of: the training on one device; None: `reference_bounds`.

    Raises:
        UserError: what the run asks for is not possible.
    """
    with arithmetic_of_ranks():
        if local_update_axis(subject.mesh) is None:
            return _prove(subject, bounds_of or reference_bounds)
        return _prove_sites(subject)


def _prove_sites(subject: Subject) -> ProofReport:
    """The layout inside a site, then the steps that join the sites. See `weft.prove.local_updates`."""
    start = time.perf_counter()
    inside = _prove(subject.inside_site(), reference_bounds)
    passes = inside.passes
    if inside.holds:
        outer = SiteProof.of(subject).compare()
        passes = (*passes, outer)
    return replace(
        inside,
        layout=subject.layout_text,
        ranks=subject.mesh.size,
        passes=passes,
        seconds=time.perf_counter() - start,
        notes=(*inside.notes, sites_note(subject.mesh)),
    )


def _prove(subject: Subject, bounds_of: BoundsOf) -> ProofReport:
    start = time.perf_counter()
    passes: list[Pass] = []
    notes: list[str] = []
    error = ""
    failure: Difference | None = None
    if subject.has_drawn_pairs:
        notes.append(LABELS_NOTE if subject.run.loss == "classify" else PAIRS_NOTE)
    if _is_compared_in_float64_alone(subject):
        states = " with states in 8 bits" if uses_8_bits(subject.optim) else ""
        what = "linears in fp8" if subject.has_fp8 else f"updates of {subject.optim.name}{states}"
        notes.append(JUMPS_NOTE.format(what))
    for each in in_number_types(subject):
        if each.inner.dtype is not None:
            notes.append(INNER_NOTE.format(each.inner.block, dtype_text(each.inner.dtype)))
        outcome = _prove_once(each, bounds_of)
        if isinstance(outcome, Failed):
            error = outcome.text
            failure = outcome.difference
            break
        passes.append(outcome.result)
        notes.extend(outcome.notes)
        if outcome.result.differences:
            break
    return ProofReport(
        layout=subject.layout_text,
        model=subject.model_text,
        ranks=subject.mesh.size,
        steps=subject.steps,
        passes=tuple(passes),
        error=error,
        failure=failure,
        seconds=time.perf_counter() - start,
        notes=tuple(dict.fromkeys(notes)),
    )


def in_number_types(subject: Subject) -> list[Subject]:
    """The subject in the number types in which it is compared, one after the other."""
    if _is_compared_in_float64_alone(subject):
        return [subject.in_float64()]
    if subject.types.eps > torch.finfo(torch.float32).eps:
        return [subject.in_float64(), subject]
    return [subject]


def _is_compared_in_float64_alone(subject: Subject) -> bool:
    """Whether linears in fp8, or updates, magnify rounding errors of its types."""
    types = subject.types
    if subject.has_fp8:
        return not types.is_exact
    has_16_bits = types.eps > torch.finfo(torch.float32).eps
    return not has_16_bits and not types.is_exact and has_jumps(subject.optim)


@dataclass(frozen=True)
class Failed:
    """An error that ended the run of the layout."""

    text: str
    difference: Difference

    @staticmethod
    def of(
        train: Callable[[], object], records: Sequence[RankRecord], *, subject: Subject
    ) -> Failed | None:
        """Train on the layout; where an error ended that, None where it ran.

        Args:
            records: what the ranks compute.

        Raises:
            Exception: an error that says nothing about the layout.
        """
        try:
            train()
        except Exception as error:
            if not is_fault_of_the_layout(error, records):
                raise
            difference = difference_of_error(
                error,
                records,
                mesh=subject.mesh,
                blocks=tuple(subject.family.blocks(subject.model)),
            )
            return Failed(error_text(error), difference)
        return None


@dataclass(frozen=True)
class Judged:
    """A comparison of ranks with one device, and what it did not compare."""

    result: Pass
    notes: tuple[str, ...]

    @staticmethod
    def of(
        subject: Subject, records: Sequence[RankRecord], bounds: Bounds, *, what: str = ""
    ) -> Judged:
        """Compare all that ranks have recorded.

        Args:
            what: they have trained, for the report: ", from a checkpoint".
        """
        judge = Judge(
            subject.mesh, records, bounds, has_sharded_activations=subject.has_sharded_activations
        )
        differences = judge.compare()
        result = Pass(
            f"{subject.types_text}{what}",
            bounds_text(bounds.types, is_perturbed=bool(bounds.perturbed)),
            judge.found.phase_bounds(),
            differences,
        )
        return Judged(result, _notes(judge))


def _prove_once(subject: Subject, bounds_of: BoundsOf) -> Judged | Failed:
    records = [RankRecord(rank) for rank in range(subject.mesh.size)]
    failed = Failed.of(lambda: run_layout(subject, records), records, subject=subject)
    if failed is not None and not is_between_steps(records):
        return failed
    skipped = skipped_steps(records[0].events)
    bounds = bounds_of(subject, skipped=skipped)
    judged = Judged.of(subject, records, bounds)
    if _is_near_bounds(judged.result):
        bounds = with_more_samples(bounds, subject, skipped=skipped)
        judged = Judged.of(subject, records, bounds)
    if failed is None:
        return judged
    if not judged.result.differences:
        return failed
    return replace(judged, notes=(*judged.notes, ENDED_NOTE.format(failed.text)))


def _notes(judge: Judge) -> tuple[str, ...]:
    notes = list(judge.found.notes)
    names = sorted(judge.found.uncompared)
    if names:
        shown = ", ".join(names[:MAX_NOTES])
        num_more = len(names) - MAX_NOTES
        more = f" and {num_more} more" if num_more > 0 else ""
        notes.append(f"not compared, of no known shape on a rank: {shown}{more}")
    if judge.found.wide:
        notes.append(wide_note(judge.found.wide, "tensors"))
    return tuple(notes)


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

        run_ranks(subject.mesh, rank, timeout_s=TIMEOUT_S, takes_turns=True)


def _train_rank(subject: Subject, comm: Comm, record: RankRecord, out: str) -> None:
    num_before = subject.steps - STEPS_AFTER_RESUME
    last = TrainedPart(out, subject.steps, evaluates=True)
    if num_before < 1:
        last.train(subject, comm, record=record)
        return
    TrainedPart(out, num_before, saves=True, evaluates_between=True).train(
        subject, comm, record=record
    )
    if comm.rank == 0:
        record_stored(record, Path(out), num_before)
    record.progress.is_restoring = True
    replace(last, resume="auto").train(subject, comm, record=record)


def skipped_steps(events: Iterable[Mapping[str, Any]]) -> frozenset[int]:
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
        each = reference(subject, perturbation=perturbation, skipped=skipped)
        perturbed.append(each.run_all(subject.steps))
    whole = reference(subject, skipped=skipped)
    has_zero_matrices = whole.has_zero_matrices
    bounds = Bounds(
        whole.run_all(subject.steps),
        tuple(perturbed),
        whole.types,
        update_eps=MUON_EPS if subject.optim.name == "muon" else 0.0,
    )
    if not whole.types.is_exact:
        free_outputs = whole.free_outputs(subject.steps, bounds.free_updates)
        bounds = replace(bounds, free_outputs=free_outputs)
        draws_signs = has_zero_matrices
    else:
        draws_signs = magnifies_noise(subject.optim)
    if not draws_signs:
        return bounds
    drawn = Perturbation(noise_seed=DRAWN_SIGNS_SEED, free_signs=bounds.small_gradient)
    with_drawn_signs = reference(subject, perturbation=drawn, skipped=skipped)
    trace = with_drawn_signs.run_all(subject.steps)
    return replace(bounds, perturbed=(*perturbed, trace))


def _is_near_bounds(result: Pass) -> bool:
    """Whether all differences are so near to bounds of a few samples that more samples may explain them."""
    differences = result.differences
    return bool(differences) and all(
        0.0 < each.measured <= MOST_EXCESS * each.bound for each in differences
    )


def with_more_samples(bounds: Bounds, subject: Subject, *, skipped: frozenset[int]) -> Bounds:
    """The bounds with MORE_SAMPLES further versions of each perturbation of the reference.

    Where a computation magnifies rounding, how far two perturbed runs move a tensor says little of how
    far a third one may move it.

    Args:
        skipped: see `Reference`.
    """
    perturbed = list(bounds.perturbed)
    for number in range(1, MORE_SAMPLES + 1):
        for perturbation in subject.perturbations():
            seed = MORE_SAMPLES_SEED * number + (perturbation.noise_seed or 0)
            other = replace(perturbation, noise_seed=seed)
            each = reference(subject, perturbation=other, skipped=skipped)
            perturbed.append(each.run_all(subject.steps))
    return replace(bounds, perturbed=tuple(perturbed))


def reference(
    subject: Subject,
    *,
    perturbation: Perturbation = PLAIN,
    records: bool = True,
    skipped: frozenset[int] | None = None,
) -> Reference:
    """The one-device reference of a subject."""
    return Reference(subject.task(), perturbation=perturbation, records=records, skipped=skipped)


def bounds_text(types: NumberTypes, *, is_perturbed: bool = False) -> str:
    """Where the bounds come from.

    Args:
        is_perturbed: whether a run in float64 has perturbed versions.
    """
    noise = f"{FACTOR:g} times what rounding noise of one unit moves the same computation"
    if not types.is_exact:
        return noise
    return f"{TOLERANCE:.0e}, or {noise}" if is_perturbed else f"{TOLERANCE:.0e}"
