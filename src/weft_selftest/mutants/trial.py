"""Trial of a mutant: whether it changes what is trained, whether a proof reports it, and whether the report names its place."""

from __future__ import annotations

import re
import shlex
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from weft.config.changed_runs import with_degree
from weft.config.load import load
from weft.config.small_runs import is_valid
from weft.errors import type_and_message
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.subject import ProofCase, Subject, reduced_case
from weft_selftest.mutants.effect import (
    TrainedNumbers,
    changed_numbers,
    layout_words,
    trained_numbers,
    user_words,
    write_texts,
)
from weft_selftest.mutants.fault import Mutant, MutantLayout
from weft_selftest.mutants.plant import planted
from weft_selftest.mutants.sightings import Sighting, TypesOf, seen_by_types, seen_in_first_step

STEPS_OF_HEALTHY = 3
STEPS_AS_STARTED = 2
"""Of a run whose first step is compared: while that is trained, the next one is read."""
ERRORS_OF_CODE = ("AttributeError", "NameError", "TypeError", "UnboundLocalError")
"""Errors that planted code raises when what it replaces has changed: no fault of numbers was planted then."""


@dataclass(frozen=True)
class MutantResult:
    """What became of a mutant.

    Attributes:
        effect: the trained number that it changes most; "" if it changes none.
        report: of the proof with the mutant planted; None if it has no effect.
        first_step: what the comparison of the first step says; None where it was not asked, since the
            proof had rejected the run.
        types: what the types of the step say; None likewise.
        false_alarm: what the proof reports of the layout without the mutant; then the trial says
            nothing.
    """

    mutant: Mutant
    effect: str
    report: ProofReport | None
    seconds: float
    false_alarm: str = ""
    first_step: Sighting | None = None
    types: Sighting | None = None

    @property
    def has_effect(self) -> bool:
        """Whether it changes what is trained."""
        return self.effect != ""

    @property
    def is_broken(self) -> bool:
        """Whether the planted code does not fit what it replaces."""
        return self.report is not None and self.report.error.startswith(ERRORS_OF_CODE)

    @property
    def is_seen_by_proof(self) -> bool:
        """Whether the proof fails; a mutant without effect, or with broken code, is not seen by anything."""
        return self.report is not None and not self.report.holds and not self.is_broken

    @property
    def is_seen_by_first_step(self) -> bool:
        """Whether the run stops in its first step."""
        return self.has_effect and self.first_step is not None and self.first_step.is_seen

    @property
    def is_seen_by_types(self) -> bool:
        """Whether the types of the step do not agree."""
        return self.has_effect and self.types is not None and self.types.is_seen

    @property
    def is_detected(self) -> bool:
        """Whether the run does not train: its proof fails, or it stops in its first step."""
        return self.is_seen_by_proof or (not self.is_broken and self.is_seen_by_first_step)

    @property
    def message(self) -> str:
        """The first difference, or the error that ended the layout."""
        report = self.report
        if self.false_alarm:
            return f"FALSE ALARM without the fault: {self.false_alarm}"
        if report is None:
            return "no effect on this layout"
        if self.is_broken:
            return f"the planted code fails: {report.error}"
        if report.error:
            return report.error
        if report.first is not None:
            return str(report.first)
        return self._first_step_text or "NOT DETECTED"

    @property
    def _first_step_text(self) -> str:
        return self.first_step.message if self.first_step is not None else ""

    @property
    def axis(self) -> str:
        """Mesh axis that is named first."""
        if self.is_seen_by_proof and self.report is not None:
            return self.report.axis
        return self.first_step.axis if self.first_step is not None else ""

    @property
    def block(self) -> str:
        """Block that is named first."""
        if not self.is_seen_by_proof and self.first_step is not None:
            return self.first_step.block
        first = self.report.first if self.report is not None else None
        return first.block if first is not None else ""

    @property
    def is_right_axis(self) -> bool:
        """Whether the axis of the fault is named; a mesh of one axis has no other."""
        expected = self.mutant.axes
        if not self.is_detected:
            return False
        is_only_one = not self.is_seen_by_proof and len(self.mutant.layout.mesh.split()) == 1
        return not expected or self.axis in expected or is_only_one

    @property
    def is_right_block(self) -> bool:
        """Whether the report names a block in which the fault can show first."""
        report, patterns = self.report, self.mutant.blocks
        if report is None or not self.is_detected:
            return False
        if not self.is_seen_by_proof:
            return any(fnmatchcase(self.block, pattern) for pattern in patterns)
        first = report.first
        if first is not None and any(fnmatchcase(first.block, pattern) for pattern in patterns):
            return True
        words = re.split(r"[^\w]", report.error)
        return any(fnmatchcase(word, pattern) for word in words for pattern in patterns if pattern)

    @property
    def is_attributed(self) -> bool:
        """Whether block and axis are right."""
        return self.is_right_axis and self.is_right_block

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return {
            "mutant": self.mutant.name,
            "what": self.mutant.what,
            "reference": self.mutant.reference,
            "layout": str(self.mutant.layout),
            "effect": self.effect,
            "false_alarm": self.false_alarm,
            "detected": self.is_detected,
            "proof": self.is_seen_by_proof,
            "first_step": None if self.first_step is None else self.is_seen_by_first_step,
            "types": None if self.types is None else self.is_seen_by_types,
            "message": self.message,
            "axis": self.axis,
            "block": self.block,
            "right_axis": self.is_right_axis,
            "right_block": self.is_right_block,
            "seconds": round(self.seconds, 2),
        }


def _false_alarm(subject: Subject) -> str:
    """The first difference of a healthy layout; "" if it is equal to one device."""
    report = prove(subject)
    if report.holds:
        return ""
    return report.error or str(report.first)


def _proof(case: ProofCase) -> ProofReport:
    """The report, with the smallest mesh that fails, too."""
    try:
        subject = case.opened()
        report = prove(subject)
        if not report.holds and not _names_axis(report):
            report = report.with_smallest(_on_fewest_axes(case, report))
    except Exception as error:  # noqa: BLE001 - a mutant may fail in any way
        return ProofReport.of_error(
            type_and_message(error), layout=str(case.mesh), model=case.family_name, steps=case.steps
        )
    return report


def _names_axis(report: ProofReport) -> bool:
    """Whether the numbers themselves tell the axis, as missing terms of a sum do."""
    first = report.first
    return first is not None and bool(first.axis) and first.axis in first.relation


def _on_fewest_axes(case: ProofCase, report: ProofReport) -> ProofReport:
    """The report without each axis that is not needed to fail; see `smallest_case`."""
    for axis, _ in case.mesh.axes:
        run = with_degree(case.run, axis, 1)
        if not is_valid(run):
            continue
        tried = replace(case, run=run)
        found = prove(tried.opened())
        if not found.holds:
            case = tried
            report = found
    return report


@dataclass
class MutantTrials:
    """Trials of mutants; what healthy layouts train is computed once.

    Attributes:
        folder: temporary; receives texts and run folders.
        types_of: checks the types of a step; then every check looks at every mutant. None: the first
            step is compared only of runs whose proof holds.
    """

    folder: Path
    types_of: TypesOf | None = None
    healthy: dict[MutantLayout, TrainedNumbers] = field(default_factory=dict)
    false_alarms: dict[MutantLayout, str] = field(default_factory=dict)
    num_runs: int = 0

    def small_case(self, layout: MutantLayout) -> ProofCase:
        """The run of a layout that is trained to find effects."""
        run = load([*layout_words(layout, self.folder)], FAMILIES)
        return ProofCase(run, STEPS_OF_HEALTHY)

    def user_case(self, layout: MutantLayout, *, steps: int) -> ProofCase:
        """The proof of a user's run of a layout, at reduced size."""
        return reduced_case(load([*user_words(layout, self.folder)], FAMILIES), steps)

    def command(self, layout: MutantLayout) -> str:
        """The command that proves the user's run without a mutant."""
        return shlex.join(["weft", "prove", *user_words(layout, self.folder)])

    def trial(self, mutant: Mutant) -> MutantResult:
        """Plant a mutant and prove a user's run of its layout."""
        start = time.perf_counter()
        case = self.small_case(mutant.layout)
        healthy = self._healthy(mutant.layout)
        alarm = self.false_alarms[mutant.layout]
        if alarm:
            return MutantResult(mutant, "", None, time.perf_counter() - start, alarm)
        with planted(mutant):
            numbers = trained_numbers(case, self._new_folder())
        effect = changed_numbers(healthy, numbers, dtype=case.compute_dtype)
        if not effect:
            return MutantResult(mutant, effect, None, time.perf_counter() - start)
        with planted(mutant):
            report = _proof(self.user_case(mutant.layout, steps=mutant.steps))
        first_step = types = None
        if report.holds or self.types_of is not None:
            first_step = seen_in_first_step(mutant, self.run_as_started(mutant.layout))
        if self.types_of is not None:
            types = seen_by_types(mutant, self.run_as_started(mutant.layout), self.types_of)
        return MutantResult(
            mutant, effect, report, time.perf_counter() - start, first_step=first_step, types=types
        )

    def run_as_started(self, layout: MutantLayout) -> ProofCase:
        """A small run of a layout, with the number types of a run as users start it."""
        run = load([*layout_words(layout, self.folder, types="own")], FAMILIES)
        return ProofCase(run.with_values({"out": str(self._new_folder())}), STEPS_AS_STARTED)

    def _healthy(self, layout: MutantLayout) -> TrainedNumbers:
        if layout not in self.healthy:
            case = self.small_case(layout)
            numbers = trained_numbers(case, self._new_folder())
            assert not numbers.error, f"{layout} fails without a mutant: {numbers.error}"
            self.healthy[layout] = numbers
            user_case = self.user_case(layout, steps=STEPS_OF_HEALTHY)
            self.false_alarms[layout] = _false_alarm(user_case.opened())
        return self.healthy[layout]

    def _new_folder(self) -> Path:
        self.num_runs += 1
        folder = self.folder / f"run{self.num_runs}"
        folder.mkdir()
        return folder


def try_mutants(
    mutants: Iterable[Mutant], *, types_of: TypesOf | None = None
) -> Iterator[MutantResult]:
    """Plant each mutant, one after the other; yields each result as it is found.

    Args:
        types_of: as of `MutantTrials`.
    """
    with tempfile.TemporaryDirectory(prefix="weft-mutants-") as name:
        folder = Path(name)
        write_texts(folder)
        trials = MutantTrials(folder, types_of)
        for mutant in mutants:
            yield trials.trial(mutant)
