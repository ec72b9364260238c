"""Result of a proof: the differences with their place and numeric relation, the bounds, text and JSON. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, get_args

from weft.errors import counted
from weft.prove.losses import StepLosses
from weft.prove.report_text import ranks_text, wrapped

Phase = Literal[
    "batch",
    "forward",
    "loss",
    "backward",
    "reduce",
    "norm",
    "clip",
    "moments",
    "update",
    "checkpoint",
    "evaluation",
    "generation",
    "export",
    "import",
]
PHASES: tuple[Phase, ...] = get_args(Phase)
"""Phases of one step, in the order of their execution; what uses a trained model follows the last
step."""

VerdictWord = Literal["equal", "not equal"]

MAX_SHOWN = 5
"""Differences that the text lists."""
MAX_DETAILED = 3
"""Passes up to which the text has a line for each phase of each."""
MAX_STORED = 200
"""Differences that the JSON holds."""


@dataclass(frozen=True)
class Difference:
    """A logical tensor that ranks compute otherwise than one device does.

    Attributes:
        tensor: logical name: a parameter, `layer0.output`, `layer0.output gradient`, `loss`,
            `gradient norm`, `tokens`, ...
        block: block of the chain; "" for numbers of the whole step.
        parameter: global name; "" where the tensor is none.
        phase: part of the step in which the tensor is computed.
        step: from 1.
        micro_batch: number on its rank; None where the tensor is not of one micro-batch.
        axis: mesh axis that the difference follows, or several joined by "+"; "" where none does.
        ranks: world ranks on which the tensor differs.
        collective: the operation before the tensor, as `all_reduce over dp, ranks 0 2`.
        relation: how the numbers relate to the right ones, e.g. "2 times the right values".
        measured: largest relative difference; infinite where a value is not finite or missing.
        bound: largest relative difference that rounding explains.
    """

    tensor: str
    block: str
    parameter: str
    phase: Phase
    step: int
    micro_batch: int | None
    axis: str
    ranks: tuple[int, ...]
    collective: str
    relation: str
    measured: float
    bound: float

    @property
    def title(self) -> str:
        """Phase, step, micro-batch and tensor."""
        place = f"{self.phase} of step {self.step}"
        if self.micro_batch is not None:
            place = f"{place}, micro-batch {self.micro_batch}"
        return f"{place}: {self.tensor}"

    @property
    def where(self) -> str:
        """Ranks and mesh axis."""
        ranks = ranks_text(self.ranks)
        return f"{ranks}; follows the axis {self.axis}" if self.axis else ranks

    def lines(self) -> Iterator[str]:
        """The title, and a line for each fact."""
        yield self.title
        yield f"  is {self.relation}"
        yield f"  on {self.where}"
        if self.collective:
            yield f"  preceding collective: {self.collective}"
        yield f"  relative difference {self.measured:.1e}, bound {self.bound:.1e}"

    def __str__(self) -> str:
        axis = f" (axis {self.axis})" if self.axis else ""
        return f"{self.title} is {self.relation} on {ranks_text(self.ranks)}{axis}"


@dataclass(frozen=True)
class PhaseBound:
    """How close the tensors of one phase came to their bounds.

    Attributes:
        compared: tensors that were compared.
        largest: largest relative difference.
        bound: the bound of that tensor.
        closest: largest ratio of a difference to its own bound; above 1 is a difference.
    """

    phase: Phase
    compared: int
    largest: float
    bound: float
    closest: float


@dataclass(frozen=True)
class Pass:
    """One comparison: a number type, and what was found.

    Attributes:
        dtype: "float64", or "float32", or "bfloat16 with float32 parameters".
        source: where the bounds come from.
    """

    dtype: str
    source: str
    bounds: tuple[PhaseBound, ...]
    differences: tuple[Difference, ...]

    @property
    def compared(self) -> int:
        """Number of compared tensors."""
        return sum(bound.compared for bound in self.bounds)

    @property
    def summary(self) -> str:
        """One line: what was compared, and how close the closest tensor came to its bound."""
        if not self.bounds:
            return f"{self.dtype}: nothing"
        closest = max(self.bounds, key=lambda bound: bound.closest)
        number = counted(self.compared, "tensor")
        largest = f"largest difference {closest.largest:.1e}, bound {closest.bound:.1e}"
        return f"{self.dtype}: {number}, {largest}"


@dataclass(frozen=True)
class ProofReport:
    """Result of a proof.

    Attributes:
        layout: mesh and options, as text.
        model: the model, as text, with the sizes that were compared.
        ranks: number of ranks.
        steps: optimizer steps.
        passes: comparisons, one a number type.
        error: the error that ended the run of the layout; "" where it ran.
        failure: where that error came, as a difference.
        seconds: elapsed time.
        reduced: sizes that were reduced: key -> (as configured, as compared).
        smallest: the smallest case that fails likewise; None where it was not looked for.
        command: the command that repeats this proof.
        notes: what was not compared, and why.
        against: what the layout is compared with.
        covered: the parts of a run that were compared.
        uncovered: the other parts that this run has, and how to prove them.
        losses: of each step, where recorded ones were compared.
    """

    layout: str
    model: str
    ranks: int
    steps: int
    passes: tuple[Pass, ...]
    error: str = ""
    failure: Difference | None = None
    seconds: float = 0.0
    reduced: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    smallest: ProofReport | None = None
    command: str = ""
    notes: tuple[str, ...] = ()
    against: str = "one device"
    covered: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()
    losses: tuple[StepLosses, ...] = ()

    @staticmethod
    def of_error(error: str, *, layout: str, model: str, steps: int) -> ProofReport:
        """The report of a proof that an error has ended."""
        return ProofReport(layout, model, ranks=0, steps=steps, passes=(), error=error)

    @property
    def verdict(self) -> VerdictWord:
        """Whether the layout computes what one device computes."""
        return "not equal" if self.error or self.differences else "equal"

    @property
    def holds(self) -> bool:
        """Whether the verdict is "equal"."""
        return self.verdict == "equal"

    @property
    def differences(self) -> tuple[Difference, ...]:
        """Of all passes; each in the order of execution."""
        found: list[Difference] = []
        for each in self.passes:
            found.extend(each.differences)
        if self.failure is not None:
            found.append(self.failure)
        return tuple(found)

    @property
    def first(self) -> Difference | None:
        """The first difference in the order of execution, with the axis of the smallest case where
        that is a single one.
        """
        differences = self.differences
        if not differences:
            return None
        first = differences[0]
        is_named = bool(first.axis) and first.axis in first.relation
        if is_named or self.smallest is None or not self.smallest.has_one_axis:
            return first
        found = self.smallest.first
        return replace(first, axis="" if found is None else found.axis)

    @property
    def has_one_axis(self) -> bool:
        """Whether the mesh has one axis at most, so that a difference follows that one."""
        return len(self.layout.partition(",")[0].split()) == 1 or self.ranks == 1

    @property
    def axis(self) -> str:
        """Mesh axis of the first difference."""
        first = self.first
        return "" if first is None else first.axis

    @property
    def bounds(self) -> tuple[PhaseBound, ...]:
        """The bounds of all passes, by phase."""
        found: list[PhaseBound] = []
        for each in self.passes:
            found.extend(each.bounds)
        return tuple(found)

    @property
    def compared(self) -> int:
        """Number of compared tensors."""
        return sum(each.compared for each in self.passes)

    def with_smallest(self, smallest: ProofReport) -> ProofReport:
        """The report with the smallest case that fails likewise."""
        return replace(self, smallest=smallest)

    @property
    def coverage(self) -> str:
        """What was compared, and what was not, as the end of a line; "" where nothing says so."""
        texts = []
        if self.covered:
            texts.append(f"; covered: {', '.join(self.covered)}")
        if self.uncovered:
            texts.append(f"; not covered: {', '.join(self.uncovered)}")
        return "".join(texts)

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        first = self.first
        return {
            "verdict": self.verdict,
            "layout": self.layout,
            "against": self.against,
            "model": self.model,
            "ranks": self.ranks,
            "steps": self.steps,
            "compared": self.compared,
            "covered": list(self.covered),
            "not_covered": list(self.uncovered),
            "seconds": round(self.seconds, 3),
            "first": None if first is None else _as_json(asdict(first)),
            "error": self.error,
            "error_axis": self.axis if self.error else "",
            "passes": [_pass_dict(each) for each in self.passes],
            "reduced": {key: list(values) for key, values in self.reduced.items()},
            "command": self.command,
            "notes": list(self.notes),
            "losses": [_as_json(asdict(each)) for each in self.losses],
            "smallest": None if self.smallest is None else self.smallest.to_dict(),
        }

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(self.to_dict(), indent=1)

    def lines(self) -> Iterator[str]:
        """The report as text of 80 columns."""
        for line in self._unwrapped_lines():
            yield from wrapped(line)

    def _unwrapped_lines(self) -> Iterator[str]:
        ranks = counted(self.ranks, "rank")
        steps = counted(self.steps, "step")
        yield f"{self.layout}, {ranks} as threads, {steps}, compared with {self.against}"
        yield f"model: {self.model}"
        if self.reduced:
            changes = []
            for key, (configured, compared) in self.reduced.items():
                changes.append(f"{key} {configured} -> {compared}")
            yield f"reduced sizes (--full keeps them): {', '.join(changes)}"
        is_detailed = len(self.passes) <= MAX_DETAILED
        for each in self.passes:
            if is_detailed or each.differences:
                yield from _pass_lines(each)
            else:
                yield each.summary
        yield from self.notes
        yield from self._verdict_lines()

    def _verdict_lines(self) -> Iterator[str]:
        compared = f"{self.compared:,} tensors and numbers in {self.seconds:.1f} s"
        if self.holds:
            yield f"equal: {compared}{self.coverage}"
            return
        first = self.first
        if self.error:
            yield f"NOT equal: the layout stops with an error: {self.error}"
            if first is not None:
                yield from _place_lines(first)
        elif first is not None:
            total = len(self.differences)
            yield f"NOT equal: {total:,} of {compared} differ; the first in the order of execution:"
            for line in first.lines():
                yield f"  {line}"
            for other in self.differences[1:MAX_SHOWN]:
                yield f"  then {other}"
        if self.smallest is not None:
            case = self.smallest
            yield f"smallest failing case: {case.layout}, {counted(case.steps, 'step')}, {case.model}"
            found = case.first
            if found is not None:
                yield f"  {found}"
            yield f"  {case.command}"
        elif self.command:
            yield f"again: {self.command}"


def _place_lines(failure: Difference) -> Iterator[str]:
    """Where an error ended the layout."""
    yield f"  in {failure.title}"
    yield f"  on {failure.where}"


def _pass_lines(each: Pass) -> Iterator[str]:
    yield f"{each.dtype}; bounds: {each.source}"
    for bound in each.bounds:
        number = counted(bound.compared, "tensor")
        title = f"{bound.phase:<10} {number:>13}"
        largest = f"largest difference {bound.largest:.1e}"
        mark = "" if bound.closest <= 1 else "  DIFFERS"
        yield f"  {title}: {largest}, bound {bound.bound:.1e}{mark}"


def _pass_dict(each: Pass) -> dict[str, Any]:
    shown = each.differences[:MAX_STORED]
    return {
        "dtype": each.dtype,
        "bounds_from": each.source,
        "bounds": [_as_json(asdict(bound)) for bound in each.bounds],
        "num_differences": len(each.differences),
        "differences": [_as_json(asdict(difference)) for difference in shown],
    }


def _as_json(values: dict[str, Any]) -> dict[str, Any]:
    """Values without infinities, which JSON does not have."""
    found = dict(values)
    for key, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            found[key] = None
    return found
