"""Generated layouts of every family, proved one after the other, and trained with steps that are compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import counted, type_and_message
from weft.prove.proof import prove
from weft.prove.report import ProofReport
from weft.prove.subject import ProofCase, reduced_case
from weft_selftest.generated_runs import Choices, GeneratedRun, generated_runs

STEPS = 3


@dataclass(frozen=True)
class ComparedSteps:
    """Steps of a run that were compared with one device while it trained.

    Attributes:
        steps: how many.
        closest: largest share of a bound that a difference took.
        error: what stopped the run; "" where nothing did.
        command: repeats it.
    """

    steps: int
    closest: float
    error: str
    command: str


Train = Callable[[GeneratedRun], ComparedSteps]
"""Trains a run, with its own sizes, and compares its steps."""


@dataclass(frozen=True)
class SweepResult:
    """The proof of one generated layout, with reduced sizes, and the comparison of its steps.

    Attributes:
        report: None where it is not proved.
        trained: None where it is not trained.
    """

    case: ProofCase
    report: ProofReport | None
    trained: ComparedSteps | None

    @property
    def holds(self) -> bool:
        """Whether nothing differs from one device."""
        return not self.messages

    @property
    def messages(self) -> Sequence[str]:
        """Of each check that failed: the first difference, or the error, and the command that repeats it."""
        found: list[str] = []
        if self.report is not None and not self.report.holds:
            found.append(f"{self.report.error or self.report.first}\n  {self.case.command}")
        if self.trained is not None and self.trained.error:
            found.append(f"{self.trained.error}\n  {self.trained.command}")
        return found


@dataclass(frozen=True)
class SweepSummary:
    """Counts of a sweep."""

    results: Sequence[SweepResult]
    seconds: float

    @property
    def failed(self) -> tuple[SweepResult, ...]:
        """Layouts that differ from one device."""
        return tuple(result for result in self.results if not result.holds)

    @property
    def steps_compared(self) -> int:
        """Steps of training that were compared."""
        return sum(each.trained.steps for each in self.results if each.trained is not None)

    @property
    def num_without_steps(self) -> int:
        """Runs none of whose steps could be compared: for want of memory, or since all overflowed."""
        return sum(
            1 for each in self.results if each.trained is not None and not each.trained.steps
        )

    @property
    def closest(self) -> float:
        """Largest share of a bound that a difference took in a step of training."""
        return max(
            (each.trained.closest for each in self.results if each.trained is not None), default=0.0
        )

    @property
    def layouts_per_minute(self) -> float:
        """Proofs in a minute, measured."""
        return 60 * len(self.results) / max(self.seconds, 1e-9)

    @property
    def holds(self) -> bool:
        """Whether every layout is equal to one device."""
        return not self.failed

    def lines(self, *, seed: int) -> Iterator[str]:
        """The counts as text."""
        yield (
            f"{counted(len(self.results), 'layout')}, {len(self.failed)} differ; "
            f"{self.layouts_per_minute:.1f} layouts a minute, measured; seed {seed}"
        )
        trained = [each for each in self.results if each.trained is not None]
        if trained:
            in_16_bits = sum(1 for each in trained if "16" in each.case.compute_dtype)
            yield (
                f"{counted(len(trained), 'run')} trained, {in_16_bits} in 16 bits; {self.steps_compared} "
                f"steps compared with one device; largest share of a bound {self.closest:.2f}"
            )
        if self.num_without_steps:
            yield f"{counted(self.num_without_steps, 'run')} without a compared step"

    def to_dict(self, *, seed: int) -> dict[str, Any]:
        """Values for JSON."""
        failed = [message for each in self.failed for message in each.messages]
        return {
            "layouts": len(self.results),
            "steps_compared": self.steps_compared,
            "runs_without_compared_step": self.num_without_steps,
            "failed": failed,
            "seconds": round(self.seconds, 1),
            "layouts_per_minute": round(self.layouts_per_minute, 1),
            "seed": seed,
        }


def sweep(
    minutes: float, *, seed: int, choices: Choices, proves: bool, train: Train | None
) -> Iterator[SweepResult]:
    """Check generated layouts until the time is over, at least one.

    Args:
        choices: from what they are generated.
        proves: whether each is proved at reduced size.
        train: what trains each; None: they are not trained.
    """
    end = time.monotonic() + 60 * minutes
    for generated in generated_runs(seed, choices):
        case = reduced_case(generated.run, STEPS)
        report = _proof(case) if proves else None
        yield SweepResult(case, report, train(generated) if train else None)
        if time.monotonic() >= end:
            return


def _proof(case: ProofCase) -> ProofReport:
    """The report; of an error that is none of the layout's own, too."""
    try:
        return prove(case.opened())
    except Exception as error:  # noqa: BLE001 - the sweep goes on
        return ProofReport.of_error(
            type_and_message(error), layout=case.mesh.text, model=case.family_name, steps=case.steps
        )
