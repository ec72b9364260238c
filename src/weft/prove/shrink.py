"""The smallest case of a run that fails its proof: fewer steps, ranks, options, layers and sequences."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from weft.errors import UserError
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.subject import ProofCase

MAX_SECONDS = 60.0


def smallest_case(
    case: ProofCase, report: ProofReport, *, seconds: float = MAX_SECONDS
) -> ProofReport:
    """The report of the smallest case that still fails, found greedily within some time."""
    failing = _FailingCase(case, report, time.monotonic() + seconds)
    for steps in _fewer_steps(report):
        shorter = replace(case, steps=steps)
        if failing.replace_if_failing(shorter):
            break
    for reduction in case.reductions():
        for smaller in reduction(failing.case):
            if failing.replace_if_failing(smaller):
                break
    return replace(failing.report, command=failing.case.command)


def _fewer_steps(report: ProofReport) -> list[int]:
    """Steps in which the first difference may show, fewest first."""
    first = report.first
    step_of_difference = 1 if first is None else first.step
    tried = {1, step_of_difference, step_of_difference + 1}
    return [steps for steps in sorted(tried) if steps < report.steps]


@dataclass
class _FailingCase:
    """A failing case, made smaller step by step until the deadline."""

    case: ProofCase
    report: ProofReport
    deadline_s: float

    def replace_if_failing(self, smaller: ProofCase) -> bool:
        """Whether a smaller case fails too; then it replaces the case."""
        if time.monotonic() > self.deadline_s:
            return False
        try:
            report = prove(smaller.opened())
        except UserError:
            return False
        if report.holds:
            return False
        self.case = smaller
        self.report = report
        return True
