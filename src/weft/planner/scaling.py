"""Strong and weak scaling: the best layouts of a run on several numbers of devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from weft.config.run import Run
from weft.planner.candidates import Space, candidates
from weft.planner.layout_costs import LayoutCosts
from weft.planner.search import Found, SearchLimits, search

MOST_MEASURED = 3
"""Layouts that are measured for each number of devices."""


def scaling(
    run: Run,
    costs: LayoutCosts,
    sizes: Sequence[int],
    *,
    kind: Literal["strong", "weak"],
    memory_bytes: float,
) -> list[tuple[int, Found | None]]:
    """The best layout for each number of devices; None where none fits.

    Args:
        costs: of the run on a device.
        sizes: ascending. Weak scaling has the run's batch on the first of them.
        memory_bytes: that a rank may use.
    """
    found = []
    for size in sizes:
        batch = run.batch.global_size
        if kind == "weak":
            batch = batch * size // sizes[0]
        sized = run.with_values({"batch.global_size": batch})
        legal = candidates(sized, Space(size, costs.speeds.hardware.node))
        limits = SearchLimits(memory_bytes, MOST_MEASURED)
        result = search(legal, costs.for_run(sized), limits, target="cost")
        found.append((size, result.best[0] if result.best else None))
    return found
