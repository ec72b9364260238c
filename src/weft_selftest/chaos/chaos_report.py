"""What `weft chaos` reports: the outcome of every fault, of every layout, and medians. Pure: no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from weft_selftest.chaos.fault_plan import FaultKind, PlannedFault

Line = Mapping[str, Any]
"""A line of a ledger or of events.jsonl."""


@dataclass(frozen=True)
class FaultOutcome:
    """One fault and what followed.

    Attributes:
        is_survived: the run trained on, or ended as planned, after the fault.
        is_restarted: the ranks were started again because of it.
        detection_s: from the injection until the supervisor knew; None without a restart.
        recovery_s: from then until the first step began; None if another fault hit the start.
        steps_lost: finished steps that were trained again.
        source: memory, checkpoint or start.
        reason: the supervisor's text.
    """

    fault: PlannedFault
    is_injected: bool = False
    is_survived: bool = False
    is_restarted: bool = False
    detection_s: float | None = None
    recovery_s: float | None = None
    steps_lost: int | None = None
    source: str = ""
    reason: str = ""

    @property
    def is_needless_restart(self) -> bool:
        """Whether ranks were started again after a fault that they should have tolerated.

        A rank cannot write the run's files at its start on a full disk, and ends.
        """
        if not self.is_restarted or self.fault.ends_rank:
            return False
        is_allowed = self.fault.kind == "full_disk" and self.fault.phase == "start"
        return not is_allowed


def outcomes_of(
    faults: Sequence[PlannedFault], ledger: Sequence[Line], events: Sequence[Line], *, end: str
) -> tuple[FaultOutcome, ...]:
    """The outcome of every planned fault.

    Args:
        ledger: what ranks recorded: faults, starts and first steps.
        end: `finished`, `failed` or `hung`.
    """
    injected = {line["fault"]: line for line in ledger if "fault" in line}
    records = _Records(
        injected=injected,
        causes=_causes(faults, injected),
        starts={line["attempt"]: line for line in ledger if "detected_at_s" in line},
        resumes={line["attempt"]: line for line in ledger if "resumed_at_s" in line},
        restarts={event["attempt"]: event for event in events if event["event"] == "restart"},
        is_finished=end == "finished",
    )
    return tuple(records.outcome(fault) for fault in faults)


@dataclass(frozen=True)
class _Records:
    """The records of one run.

    Attributes:
        injected: fault -> line of the ledger.
        causes: attempt -> the fault that ended it.
        starts, resumes, restarts: attempt -> its start, its first step, its event.
    """

    injected: Mapping[int, Line]
    causes: Mapping[int, int]
    starts: Mapping[int, Line]
    resumes: Mapping[int, Line]
    restarts: Mapping[int, Line]
    is_finished: bool

    def outcome(self, fault: PlannedFault) -> FaultOutcome:
        """The outcome of one fault."""
        line = self.injected.get(fault.number)
        if line is None:
            return FaultOutcome(fault)
        attempt = line["attempt"]
        has_resumed = any(number > attempt for number in self.resumes)
        known = FaultOutcome(fault, is_injected=True, is_survived=self.is_finished or has_resumed)
        start = self.starts.get(attempt + 1)
        if start is None or self.causes[attempt] != fault.number:
            return known
        restart = self.restarts.get(attempt + 1, {})
        known = replace(
            known,
            is_restarted=True,
            detection_s=start["detected_at_s"] - line["at_s"],
            source=str(restart.get("source", "")),
            reason=str(restart.get("reason", "")),
        )
        resume = self.resumes.get(attempt + 1)
        if resume is None:
            return known
        num_left = resume["step"] - 1
        return replace(
            known,
            recovery_s=resume["resumed_at_s"] - start["detected_at_s"],
            steps_lost=max(0, line["num_done"] - num_left),
        )


def num_restarts(ledger: Sequence[Line]) -> int:
    """How often ranks were started again."""
    return max((line["attempt"] for line in ledger), default=0)


def _causes(faults: Sequence[PlannedFault], injected: Mapping[int, Line]) -> dict[int, int]:
    """Attempt -> the fault that ended it: the last that ends ranks, else the last one."""
    causes: dict[int, int] = {}
    tolerated_first = sorted(faults, key=_ends_rank)
    for fault in tolerated_first:
        if fault.number in injected:
            line = injected[fault.number]
            causes[line["attempt"]] = fault.number
    return causes


def _ends_rank(fault: PlannedFault) -> bool:
    return fault.ends_rank


@dataclass(frozen=True)
class Spread:
    """Median and largest of some numbers; None of none."""

    median: float | None
    most: float | None

    @staticmethod
    def of(values: Iterable[float | None]) -> Spread:
        """The spread of the values that are known."""
        known = [value for value in values if value is not None]
        if not known:
            return Spread(None, None)
        return Spread(median=statistics.median(known), most=max(known))

    def __str__(self) -> str:
        if self.median is None or self.most is None:
            return "-"
        return f"{self.median:.3g}, {self.most:.3g}"

    def to_json(self) -> dict[str, float | None]:
        """The fields as values of the JSON report."""
        return {"median": self.median, "max": self.most}


@dataclass(frozen=True)
class Summary:
    """Counts and spreads of some faults."""

    planned: int
    injected: int
    survived: int
    restarted: int
    detection_s: Spread
    recovery_s: Spread
    steps_lost: Spread

    @staticmethod
    def of(outcomes: Sequence[FaultOutcome]) -> Summary:
        """The summary of some outcomes."""
        return Summary(
            planned=len(outcomes),
            injected=sum(outcome.is_injected for outcome in outcomes),
            survived=sum(outcome.is_survived for outcome in outcomes),
            restarted=sum(outcome.is_restarted for outcome in outcomes),
            detection_s=Spread.of(outcome.detection_s for outcome in outcomes),
            recovery_s=Spread.of(outcome.recovery_s for outcome in outcomes),
            steps_lost=Spread.of(outcome.steps_lost for outcome in outcomes),
        )

    def to_json(self) -> dict[str, Any]:
        """The fields as values of the JSON report."""
        return {
            "planned": self.planned,
            "injected": self.injected,
            "survived": self.survived,
            "restarted": self.restarted,
            "detection_s": self.detection_s.to_json(),
            "recovery_s": self.recovery_s.to_json(),
            "steps_lost": self.steps_lost.to_json(),
        }

    def cells(self) -> tuple[str, ...]:
        """The columns of a table."""
        return (
            f"{self.injected}",
            f"{self.survived}",
            f"{self.restarted}",
            str(self.detection_s),
            str(self.recovery_s),
            str(self.steps_lost),
        )


@dataclass(frozen=True)
class TrialResult:
    """The outcome of the faults injected on one layout.

    Attributes:
        end: `finished`, `failed` or `hung`: how the run with faults ended.
        is_identical: losses, norms and final parameters equal those of the run without faults, bit
            by bit.
        restarts: the `restart` events; a start that another fault hit has none.
        num_unexplained: restarts that no fault has caused.
        error: the last message of a run that did not finish.
    """

    layout: str
    num_ranks: int
    steps: int
    outcomes: tuple[FaultOutcome, ...]
    end: str
    is_identical: bool
    restarts: tuple[Line, ...]
    num_unexplained: int
    seconds: float
    error: str = ""

    def line(self) -> str:
        """One line for the reader."""
        summary = Summary.of(self.outcomes)
        bits = "bit-identical" if self.is_identical else "NOT bit-identical"
        text = (
            f"{self.layout}: {self.end}, {summary.injected} of {summary.planned} faults injected, "
            f"{summary.survived} survived, {summary.restarted} restarts, {bits}, {self.seconds:.0f} s"
        )
        if self.num_unexplained:
            text += f", {self.num_unexplained} restarts WITHOUT A FAULT"
        if self.error:
            return f"{text}: {self.error}"
        return text


@dataclass(frozen=True)
class ChaosReport:
    """The outcomes of all layouts."""

    num_faults: int
    seed: int
    trials: tuple[TrialResult, ...]

    @property
    def outcomes(self) -> tuple[FaultOutcome, ...]:
        """The outcomes of the faults of all layouts."""
        return tuple(outcome for trial in self.trials for outcome in trial.outcomes)

    @property
    def num_hung(self) -> int:
        """Runs that hung."""
        return sum(trial.end == "hung" for trial in self.trials)

    def holds(self, claim: str) -> bool:
        """Whether a claim is true of all layouts."""
        outcomes = self.outcomes
        match claim:
            case "bit_identical":
                return all(trial.is_identical for trial in self.trials)
            case "no_hang":
                return not self.num_hung
            case "survived":
                return all(outcome.is_survived for outcome in outcomes if outcome.is_injected)
            case "injected":
                return all(outcome.is_injected for outcome in outcomes)
            case _:
                is_needless = any(outcome.is_needless_restart for outcome in outcomes)
                return not is_needless and not any(trial.num_unexplained for trial in self.trials)

    def to_json(self, claims: Sequence[str]) -> dict[str, Any]:
        """The report as one object."""
        total = Summary.of(self.outcomes)
        faults: list[dict[str, Any]] = []
        for trial in self.trials:
            for outcome in trial.outcomes:
                fields = asdict(outcome)
                faults.append({"layout": trial.layout, **fields.pop("fault"), **fields})
        layouts: list[dict[str, Any]] = []
        for trial in self.trials:
            fields = asdict(trial)
            del fields["outcomes"]
            layouts.append({**fields, **Summary.of(trial.outcomes).to_json()})
        return {
            "seed": self.seed,
            **total.to_json(),
            "hung": self.num_hung,
            "bit_identical": self.holds("bit_identical"),
            "claims": {claim: self.holds(claim) for claim in claims},
            "kinds": {kind: Summary.of(found).to_json() for kind, found in self._by_kind().items()},
            "layouts": layouts,
            "faults": faults,
        }

    def lines(self, claims: Sequence[str]) -> Iterator[str]:
        """A table of kinds as Markdown, and the claims."""
        yield ""
        yield "| fault | injected | survived | restarts | detection s (median, max) | recovery s | steps lost |"
        yield "|---|---|---|---|---|---|---|"
        for kind, found in self._by_kind().items():
            yield _row(kind.replace("_", " "), Summary.of(found))
        yield _row("all", Summary.of(self.outcomes))
        yield ""
        for outcome in self.outcomes:
            if outcome.is_needless_restart or not (outcome.is_injected and outcome.is_survived):
                yield f"{outcome.fault}: {outcome.reason or 'no restart'}"
        yield f"hung: {self.num_hung}"
        for claim in claims:
            yield f"{claim}: {'holds' if self.holds(claim) else 'DOES NOT HOLD'}"

    def _by_kind(self) -> dict[FaultKind, list[FaultOutcome]]:
        found: dict[FaultKind, list[FaultOutcome]] = {}
        for outcome in self.outcomes:
            found.setdefault(outcome.fault.kind, []).append(outcome)
        return found


def _row(name: str, summary: Summary) -> str:
    return f"| {' | '.join((name, *summary.cells()))} |"
