"""Search of the layers of every pipeline stage by the simulated step: fewer where the embedding or the head is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft_plan.search.layout_costs import LayoutCosts, Simulated

MOST_MOVES = 40
"""Layers that are moved at most."""
MIN_GAIN = 0.003
"""Share of the step that another split must spare, to be taken instead of the default one."""


def best_split(entry: Simulated, costs: LayoutCosts, memory_bytes: float) -> Simulated | None:
    """The layout with the fastest layers a stage that fit, found from its own split by moving one
    layer at a time to another stage; None where none is faster.

    Args:
        entry: a layout with at least two stages.
        memory_bytes: that a rank may use.
    """
    best = entry
    own = costs.stages.layers(entry.layout)
    by_seconds = costs.stage_costs.split_by_seconds(entry.layout)
    for split in dict.fromkeys([own, by_seconds]):
        start = costs.simulate(replace(entry.layout, split=split))
        found = _descended(start, costs, memory_bytes)
        if _is_better(found, best, memory_bytes):
            best = found
    if best is entry:
        return None
    gain = 1 - best.seconds / entry.seconds
    is_needed = entry.peak_bytes > memory_bytes
    return best if is_needed or gain >= MIN_GAIN else None


def _descended(start: Simulated, costs: LayoutCosts, memory_bytes: float) -> Simulated:
    """The last of a row of splits, each of them better than the one before."""
    best = start
    for _ in range(MOST_MOVES):
        better = _first_better(best, costs, memory_bytes)
        if better is None:
            return best
        best = better
    return best


def _first_better(entry: Simulated, costs: LayoutCosts, memory_bytes: float) -> Simulated | None:
    """The first split by one move that is better; None if none is."""
    layout = entry.layout
    seconds = costs.stage_costs.seconds(layout)
    least = costs.stages.least_layers(layout)
    for moved in moves(layout.split, seconds, least):
        found = costs.simulate(replace(layout, split=moved))
        if _is_better(found, entry, memory_bytes):
            return found
    return None


def _is_better(one: Simulated, other: Simulated, memory_bytes: float) -> bool:
    """Whether one fits better, or is faster."""
    over = max(0.0, one.peak_bytes - memory_bytes)
    other_over = max(0.0, other.peak_bytes - memory_bytes)
    return (over, one.seconds) < (other_over, other.seconds)


def moves(
    split: Sequence[int], work: Sequence[float], least: Sequence[int]
) -> Iterator[tuple[int, ...]]:
    """The splits with one layer moved from the first, the last or the busiest stage to another one,
    the least busy first.

    Args:
        split: layers of every stage.
        work: seconds of every stage.
        least: layers that every stage keeps.
    """
    stages = range(len(split))
    by_work = sorted(stages, key=work.__getitem__)
    busiest = max(stages, key=work.__getitem__)
    last = len(split) - 1
    for source in dict.fromkeys((busiest, 0, last)):
        if split[source] <= least[source]:
            continue
        for target in by_work[:MOST_TARGETS]:
            if target != source:
                yield _moved(split, source, target)


MOST_TARGETS = 4
"""Stages to which a layer is moved, those with the least work."""


def _moved(split: Sequence[int], source: int, target: int) -> tuple[int, ...]:
    counts = list(split)
    counts[source] -= 1
    counts[target] += 1
    return tuple(counts)
