"""The smallest case of a run that fails its proof: fewer steps, ranks, options, layers and sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from weft.config.changed_runs import command_of
from weft.config.run import Run
from weft.config.small_runs import is_valid
from weft.config.smaller_cases import reductions
from weft.errors import UserError
from weft.models import FAMILIES
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.small_sizes import accepts_sizes
from weft.prove.subject import Subject

MAX_SECONDS = 60.0


def smallest_case(
    run: Run,
    report: ProofReport,
    *,
    seconds: float = MAX_SECONDS,
) -> ProofReport:
    """The report of the smallest case that still fails, found greedily within some time."""
    case = _FailingCase(run, report, time.monotonic() + seconds)
    for steps in _fewer_steps(report):
        if case.replace_if_failing(run, steps):
            break
    for reduction in reductions(run, accepts_sizes):
        for smaller in reduction(case.run):
            if case.replace_if_failing(smaller, case.report.steps):
                break
    command = command_of(case.run, FAMILIES, steps=case.report.steps)
    return replace(case.report, command=command)


def _fewer_steps(report: ProofReport) -> list[int]:
    """Steps in which the first difference may show, fewest first."""
    first = report.first
    step_of_difference = 1 if first is None else first.step
    tried = {1, step_of_difference, step_of_difference + 1}
    return [steps for steps in sorted(tried) if steps < report.steps]


@dataclass
class _FailingCase:
    """A failing case, made smaller step by step until the deadline."""

    run: Run
    report: ProofReport
    deadline_s: float

    def replace_if_failing(self, run: Run, steps: int) -> bool:
        """Whether a smaller case fails too; then it replaces the case."""
        is_same = run == self.run and steps == self.report.steps
        if is_same or time.monotonic() > self.deadline_s or not is_valid(run):
            return False
        try:
            report = prove(Subject.of(run, steps=steps))
        except UserError:
            return False
        if report.holds:
            return False
        self.run = run
        self.report = report
        return True
