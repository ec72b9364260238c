"""Names of the parts of a run that `weft prove --what` proves, and what a verdict says of each. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, get_args

Part = Literal["resume", "generate", "export", "dpo", "sites"]
PARTS: tuple[Part, ...] = get_args(Part)
ALL = "all"

TRAINING = "training, a save read back, evaluation"
"""What a proof without `--what` covers."""
RECORDED = "losses and norms of recorded steps"
"""What a comparison with a run folder covers."""
PROVES_TRAINING = "a config, without --what"

COVERS: Mapping[Part, str] = MappingProxyType(
    {
        "resume": "resumes, snapshots, restarts",
        "generate": "generation with caches",
        "export": "export and import",
        "dpo": "preference pairs",
        "sites": "outer steps of sites",
    }
)
"""What the proof of each part covers."""


@dataclass(frozen=True)
class Coverage:
    """What a report says of the parts of a run.

    Attributes:
        covered: what was compared.
        uncovered: the other parts, and the words that prove them.
    """

    covered: tuple[str, ...]
    uncovered: tuple[str, ...]

    @staticmethod
    def of(proved: Collection[Part], *, parts: Collection[Part], is_trained: bool) -> Coverage:
        """The coverage of a proof.

        Args:
            proved: parts that were compared.
            parts: that the run has.
            is_trained: whether the steps of the run were compared, too.
        """
        covered = [COVERS[part] for part in PARTS if part in proved]
        missing = [part for part in PARTS if part in parts and part not in proved]
        uncovered = [f"{COVERS[part]} (--what {part})" for part in missing]
        if is_trained:
            return Coverage((TRAINING, *covered), tuple(uncovered))
        return Coverage(tuple(covered), (f"{TRAINING} ({PROVES_TRAINING})", *uncovered))
