"""Counts and lines of mutant results: how many faults a proof reports, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weft_selftest.mutants.trial import MutantResult


@dataclass(frozen=True)
class MutantSummary:
    """Counts over all trials.

    Attributes:
        planted: mutants with an effect.
        by_proof, by_first_step, by_types: mutants that each check sees, of those that it looked at.
        looked_at: mutants that every check looked at.
    """

    planted: int
    detected: int
    right_axis: int
    right_block: int
    attributed: int
    without_effect: tuple[str, ...]
    survivors: tuple[str, ...]
    wrong_place: tuple[str, ...]
    by_proof: int
    by_first_step: int
    by_types: int
    looked_at: int

    @staticmethod
    def of(results: Sequence[MutantResult]) -> MutantSummary:
        """The counts of these results."""
        effective = [result for result in results if result.has_effect]
        detected = [result for result in effective if result.is_detected]
        attributed = [result for result in detected if result.is_attributed]
        return MutantSummary(
            planted=len(effective),
            detected=len(detected),
            right_axis=sum(result.is_right_axis for result in detected),
            right_block=sum(result.is_right_block for result in detected),
            attributed=len(attributed),
            without_effect=_names(result for result in results if not result.has_effect),
            survivors=_names(result for result in effective if not result.is_detected),
            wrong_place=_names(result for result in detected if not result.is_attributed),
            by_proof=sum(result.is_seen_by_proof for result in effective),
            by_first_step=sum(result.is_seen_by_first_step for result in effective),
            by_types=sum(result.is_seen_by_types for result in effective),
            looked_at=sum(result.types is not None for result in effective),
        )

    @property
    def holds(self) -> bool:
        """Whether every mutant has an effect and is detected."""
        return not self.without_effect and not self.survivors

    def to_dict(self) -> dict[str, Any]:
        """Values for JSON."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The counts as text."""
        share = self.attributed / max(self.planted, 1)
        yield f"detected {self.detected} of {self.planted} planted faults"
        places = f"block {self.right_block}, axis {self.right_axis}"
        yield f"attributed to the right block and axis: {self.attributed} ({share:.0%}); {places}"
        if self.looked_at:
            yield (
                f"alone, of {self.looked_at}: the reduced proof sees {self.by_proof}, the first step "
                f"{self.by_first_step}, types {self.by_types}"
            )
        for title, names in (
            ("SURVIVES", self.survivors),
            ("without effect", self.without_effect),
            ("another place", self.wrong_place),
        ):
            for name in names:
                yield f"  {title}: {name}"


def _names(results: Iterator[MutantResult]) -> tuple[str, ...]:
    return tuple(result.mutant.name for result in results)


def result_lines(result: MutantResult) -> Iterator[str]:
    """One result as text."""
    state = "detected" if result.is_detected else "SURVIVES"
    if not result.has_effect:
        state = "no effect"
    place = "" if result.is_attributed or not result.is_detected else ", another place"
    yield f"{result.mutant.name}: {state}{place} ({result.mutant.layout}, {result.seconds:.1f} s)"
    yield f"  {result.message}"
