"""Strong and weak scaling: the best layouts of a run on several numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from weft.config.layout_keys import LayoutKeys
from weft_plan.search.candidates import Space, candidates
from weft_plan.search.found_layouts import Found
from weft_plan.search.layout_costs import LayoutCosts
from weft_plan.search.limits import SearchLimits
from weft_plan.search.search import search

MOST_MEASURED = 2
"""Layouts that are measured for each number of devices."""

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class ScaledLayout:
    """The best layout on a number of devices; None where none is legal and fits."""

    num_devices: int
    global_size: int
    best: Found | None

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all devices."""
        return 0.0 if self.best is None else self.best.prediction.tokens_per_s


def scaling(
    keys: LayoutKeys,
    costs: LayoutCosts,
    sizes: Sequence[int],
    *,
    pinned: frozenset[str],
    kind: Scaling,
    memory_bytes: float,
    seconds: float | None,
) -> list[ScaledLayout]:
    """The best layout for each number of devices.

    Args:
        keys: of the run; the mesh is not used.
        costs: of its layouts on a device.
        sizes: ascending. Weak scaling has the run's batch on the first of them.
        pinned: keys of the run whose values stay, besides the mesh.
        memory_bytes: that a rank may use.
        seconds: of one core, for all sizes together; None: no limit.
    """
    found = []
    for size in sizes:
        batch = keys.batch.global_size
        if kind == "weak":
            batch = batch * size // sizes[0]
        limits = SearchLimits(
            memory_bytes,
            most_measured=MOST_MEASURED,
            seconds=None if seconds is None else seconds / len(sizes),
            has_front=False,
            splits=False,
            reorders=True,
        )
        space = Space(size, costs.speeds.hardware.node, pinned - {"mesh"})
        tried = candidates(keys.with_batch(batch), space)
        result = search(tried, costs.with_batch(batch), limits, target="time")
        best = result.best[0] if result.best else None
        found.append(ScaledLayout(size, batch, best))
    return found
