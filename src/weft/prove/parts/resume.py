"""Proof of resumes: a run that goes on, on its own layout or another, computes what one device does without a stop."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from weft.core.mesh import Mesh
from weft.prove.bounds import Bounds
from weft.prove.parts.comparisons import Compared, Comparisons
from weft.prove.parts.continuation import Continuation
from weft.prove.parts.stopped_run import StoppedRun, fresh_records, train_whole
from weft.prove.proof import Failed, Judged, in_number_types, reference_bounds, skipped_steps
from weft.prove.record import RankRecord, Site
from weft.prove.report import PHASES, Pass, Phase
from weft.prove.subject import Subject
from weft.train.training import Event

Result = Pass | Judged | Failed
"""What one comparison finds."""
SAME_BITS = "the same bits as without a stop"
EXACT_NUMBERS: dict[str, tuple[Phase, str]] = {
    "tokens": ("batch", "number of targets"),
    "loss": ("loss", "loss"),
    "grad_norm": ("norm", "gradient norm"),
    "lr": ("update", "learning rate"),
    "loss_scale": ("update", "loss scale"),
}
"""Field of a step event -> phase and name in a report."""
NUMBERS_OF_ANY_LAYOUT = ("tokens", "lr", "loss_scale")
"""Those that do not depend on the order of sums."""


def num_steps_before(steps: int) -> int:
    """Steps of a run of so many that are trained before its stop."""
    return max(steps // 2, 1)


def resume_passes(subject: Subject, continuations: Sequence[Continuation]) -> Iterator[Result]:
    """The comparisons in each number type, one after the other: the run without a stop, then each
    continuation. The caller takes no more after one that differs.

    Args:
        subject: of two steps at least; its mesh has no sites.
    """
    unstopped = replace(subject, first_unclipped=None)
    for each in in_number_types(unstopped):
        with tempfile.TemporaryDirectory(prefix="weft-proof-") as folder:
            yield from _ResumeProof(each, Path(folder)).passes(continuations)


@dataclass(frozen=True)
class _ResumeProof:
    """The comparison in one number type.

    Attributes:
        folder: empty.
    """

    subject: Subject
    folder: Path

    def passes(self, continuations: Sequence[Continuation]) -> Iterator[Result]:
        """The comparisons, in order."""
        whole = fresh_records(self.subject)
        failed = Failed.of(
            lambda: train_whole(self.subject, whole, out=self.folder / "whole"),
            whole,
            subject=self.subject,
        )
        if failed is not None:
            yield failed
            return
        yield self._compare(self.subject, whole, "without a stop")
        stops = self.folder / "stopped"
        stops.mkdir()
        stopped = StoppedRun(self.subject, stops, num_steps_before(self.subject.steps))
        records = fresh_records(self.subject)
        has_nodes = any(each.store == "nodes" for each in continuations)
        failed = Failed.of(
            lambda: stopped.train(records, has_nodes=has_nodes), records, subject=self.subject
        )
        if failed is not None:
            yield failed
            return
        for how in continuations:
            yield from self._continued(stopped, how, whole)

    def _continued(
        self, stopped: StoppedRun, how: Continuation, whole: Sequence[RankRecord]
    ) -> Iterator[Result]:
        """One continuation, compared with one device and with the run without a stop."""
        subject = self.subject.on_mesh(how.mesh)
        assert subject is not None, "the mesh of a continuation is valid"
        records = fresh_records(subject)
        failed = Failed.of(
            lambda: stopped.go_on(subject, how, records=records), records, subject=subject
        )
        if failed is not None:
            yield failed
            return
        place = _compare_place(subject.mesh, how, records=records, num_stored=stopped.num_stored)
        # The place alone is reported then: all else differs because of it.
        if place.differences:
            yield place
            return
        before = [event for event in whole[0].events if _step(event) <= stopped.num_stored]
        # The continuation has no events of those steps, and the reference trains them, too.
        skipped = skipped_steps(before)
        compared = self._compare(subject, records, str(how), skipped_before=skipped)
        yield compared
        if not compared.result.differences:
            yield self._compare_with_whole(subject, how, records=records, whole=whole)

    def _compare(
        self,
        subject: Subject,
        records: Sequence[RankRecord],
        what: str,
        *,
        skipped_before: frozenset[int] = frozenset(),
    ) -> Judged:
        """Compare the steps that are recorded with one device.

        Args:
            skipped_before: of the steps before those.
        """
        bounds = self._bounds(skipped_before | skipped_steps(records[0].events))
        return Judged.of(subject, records, bounds, what=f", {what}")

    def _bounds(self, skipped: frozenset[int]) -> Bounds:
        """The training on one device; layouts that skip the same steps share it."""
        if skipped not in self._known_bounds:
            self._known_bounds[skipped] = reference_bounds(self.subject, skipped=skipped)
        return self._known_bounds[skipped]

    @cached_property
    def _known_bounds(self) -> dict[frozenset[int], Bounds]:
        return {}

    def _compare_with_whole(
        self,
        subject: Subject,
        how: Continuation,
        *,
        records: Sequence[RankRecord],
        whole: Sequence[RankRecord],
    ) -> Pass:
        """The numbers that do not depend on the layout; on the same layout every bit."""
        found = Comparisons(subject.mesh)
        is_same_layout = subject.mesh == self.subject.mesh
        names = tuple(EXACT_NUMBERS) if is_same_layout else NUMBERS_OF_ANY_LAYOUT
        _compare_numbers(found, records[0].events, whole[0].events, names=names)
        if is_same_layout:
            for record, right in zip(records, whole, strict=True):
                _compare_values(found, record, right)
        found.differences.sort(key=lambda each: (each.step, PHASES.index(each.phase)))
        return found.as_pass(f"{self.subject.types_text}, {how}, bits", SAME_BITS)


def _compare_place(
    mesh: Mesh, how: Continuation, *, records: Sequence[RankRecord], num_stored: int
) -> Pass:
    """Whether the first step of a continuation is the one after the stored state. A run that begins
    again computes what one device does, too.
    """
    found = Comparisons(mesh)
    for record in records:
        trained = [_step(event) for event in record.events if event["event"] == "step"]
        num_done = min(trained, default=0) - 1
        found.check(
            Compared("number of steps that are done", "checkpoint", num_stored),
            torch.tensor(num_done),
            torch.tensor(num_stored),
            ranks=(record.rank,),
            bound=0.0,
        )
    return found.as_pass(f"place in the run, {how}", SAME_BITS)


def _step(event: Event) -> int:
    return int(event.get("step", 0))


def _compare_numbers(
    found: Comparisons,
    events: Sequence[Event],
    right_events: Sequence[Event],
    *,
    names: Sequence[str],
) -> None:
    """Compare numbers of the steps that both runs have trained."""
    right = {_step(event): event for event in right_events if event["event"] == "step"}
    for event in events:
        if event["event"] != "step":
            continue
        step = _step(event)
        for name in names:
            phase, title = EXACT_NUMBERS[name]
            found.check(
                Compared(title, phase, step),
                torch.tensor(float(event[name]), dtype=torch.float64),
                torch.tensor(float(right[step][name]), dtype=torch.float64),
                ranks=tuple(range(found.mesh.size)),
                bound=0.0,
            )


def _compare_values(found: Comparisons, record: RankRecord, right: RankRecord) -> None:
    """Compare what a rank has recorded with what it computed without a stop."""
    for site, observed in record.values.items():
        expected = right.values.get(_unstopped(site))
        what = Compared(
            site.tensor, site.phase, site.step, site.block, site.parameter, site.micro_batch
        )
        if expected is None:
            found.fail(what, "not there without a stop", ranks=(record.rank,), measured=1.0)
            continue
        found.check(what, observed.value, expected.value, ranks=(record.rank,), bound=0.0)


def _unstopped(site: Site) -> Site:
    """The tensor that a restored one was when it was saved."""
    if site.phase != "checkpoint":
        return site
    return replace(site, phase="update" if site.tensor == site.parameter else "moments")
