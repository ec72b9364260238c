"""Compare the recorded losses and gradient norms of a run with the one-device reference, step by step."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.errors import counted
from weft.prove.arithmetic import NumberTypes
from weft.prove.bounds import FACTOR, FLOOR, TOLERANCE, norm_rounding
from weft.prove.losses import StepLosses, relative_difference
from weft.prove.proof import bounds_text, reference, skipped_steps
from weft.prove.reference import Reference
from weft.prove.reference_trace import TensorKey
from weft.prove.report import Difference, Pass, PhaseBound, ProofReport
from weft.prove.subject import Subject
from weft.run.run_ranks import arithmetic_of_ranks

Number = Literal["loss", "norm"]
NAMES: dict[Number, str] = {"loss": "loss", "norm": "gradient norm"}
OTHER_SHARE = 0.25
"""Of the spread of the other number, that counts, too: a spread of two runs may be small by chance."""


@dataclass(frozen=True)
class StepComparison:
    """One number of one step.

    Attributes:
        relative: difference from one device.
        bound: largest one that rounding explains.
    """

    step: int
    number: Number
    recorded: float
    alone: float
    relative: float
    bound: float

    @property
    def is_equal(self) -> bool:
        """Whether rounding explains the difference."""
        return self.relative <= self.bound

    def difference(self, ranks: int) -> Difference:
        """The comparison as a difference of the report."""
        ratio = self.recorded / self.alone if self.alone else math.inf
        return Difference(
            tensor=NAMES[self.number],
            block="",
            parameter="",
            phase=self.number,
            step=self.step,
            micro_batch=None,
            axis="",
            ranks=tuple(range(ranks)),
            collective="",
            relation=f"{ratio:.6g} times the right value",
            measured=self.relative,
            bound=self.bound,
        )


class GrowingBound:
    """The bound of a number that grows with the spread of perturbed runs, step by step.

    Args:
        most_entries: of a trained parameter.
    """

    def __init__(self, types: NumberTypes, *, most_entries: int) -> None:
        self.types = types
        self._norm_rounding = norm_rounding(most_entries, types)
        self._spread: dict[Number, float] = {"loss": 0.0, "norm": 0.0}

    def add(self, number: Number, plain: float, perturbed: Sequence[float]) -> None:
        """Take the numbers of one step."""
        for other in perturbed:
            spread = relative_difference(other, plain)
            self._spread[number] = max(self._spread[number], spread)

    def bound(self, number: Number) -> float:
        """The bound so far."""
        if self.types.is_exact:
            return TOLERANCE
        other: Number = "norm" if number == "loss" else "loss"
        spread = max(self._spread[number], OTHER_SHARE * self._spread[other])
        rounding = self._norm_rounding if number == "norm" else 0.0
        return FACTOR * spread + FLOOR * self.types.eps + rounding


def prove_recorded(
    folder: Path,
    subject: Subject,
    recorded: Sequence[Mapping[str, Any]],
    *,
    show: Callable[[str], object],
) -> ProofReport:
    """Compare the steps of a run folder with the reference; shows each as it is computed.

    Args:
        recorded: the events of the steps that are compared.
    """
    start = time.perf_counter()
    ranks = subject.mesh.size
    show(f"{folder} ({subject.mesh}, {counted(ranks, 'rank')}) repeated on one device:")
    comparisons: list[StepComparison] = []
    with arithmetic_of_ranks():
        for loss, norm in _compare(subject, recorded):
            comparisons.extend((loss, norm))
            is_last = loss.step == len(recorded)
            if loss.step <= 3 or loss.step % 5 == 0 or is_last:
                show(_step_line(loss, norm))
    differences = [each.difference(ranks) for each in comparisons if not each.is_equal]
    result = Pass(
        subject.types_text,
        bounds_text(subject.types),
        tuple(_phase_bounds(comparisons)),
        tuple(differences),
    )
    return ProofReport(
        layout=subject.layout_text,
        model=subject.model_text,
        ranks=ranks,
        steps=len(recorded),
        passes=(result,),
        seconds=time.perf_counter() - start,
        command=f"weft prove {shlex.quote(str(folder / 'run.toml'))}",
        losses=tuple(
            StepLosses(each.step, each.recorded, each.alone, each.bound)
            for each in comparisons
            if each.number == "loss"
        ),
    )


def _compare(
    subject: Subject, recorded: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[StepComparison, StepComparison]]:
    """Yields the comparisons of the loss and of the gradient norm of each step."""
    skipped = skipped_steps(recorded)
    plain = reference(subject, records=False, skipped=skipped)
    others = [
        reference(subject, perturbation=perturbation, records=False, skipped=skipped)
        for perturbation in subject.perturbations()
    ]
    most_entries = max(param.numel() for param in plain.trained.values())
    bound = GrowingBound(plain.types, most_entries=most_entries)

    def compared(step: int, number: Number, found: float) -> StepComparison:
        alone = _number(plain, step, number)
        bound.add(number, alone, [_number(other, step, number) for other in others])
        return StepComparison(
            step,
            number,
            recorded=found,
            alone=alone,
            relative=relative_difference(found, alone),
            bound=bound.bound(number),
        )

    training = [each.steps(len(recorded)) for each in (plain, *others)]
    all_steps = zip(*training, strict=True)
    for event, (step, *_) in zip(recorded, all_steps, strict=True):
        loss = compared(step, "loss", float(event["loss"]))
        norm = compared(step, "norm", float(event["grad_norm"]))
        yield loss, norm


def _number(each: Reference, step: int, number: Number) -> float:
    key = TensorKey(step, number, NAMES[number])
    return float(each.trace.values[key])


def _step_line(loss: StepComparison, norm: StepComparison) -> str:
    step = f"step {loss.step:>3}"
    losses = f"loss {loss.recorded:.6f} and {loss.alone:.6f}"
    norms = f"gradient norm {norm.recorded:.5f} and {norm.alone:.5f}"
    return f"  {step}  {losses}  {norms}"


def _phase_bounds(comparisons: Sequence[StepComparison]) -> list[PhaseBound]:
    found = []
    for number in NAMES:
        own = [each for each in comparisons if each.number == number]
        largest = max(own, key=lambda each: each.relative)
        closest = max(each.relative / each.bound for each in own)
        bound = PhaseBound(number, len(own), largest.relative, largest.bound, closest)
        found.append(bound)
    return found
