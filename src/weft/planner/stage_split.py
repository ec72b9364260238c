"""Search of the layers of every pipeline stage by the simulated step: fewer where the embedding or the head is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.planner.layout_costs import LayoutCosts, Simulated

MOST_MOVES = 40
"""Layers that are moved at most."""
MIN_GAIN = 0.003
"""Share of the step that another split must spare, to be taken instead of the default one."""


def best_split(
    entry: Simulated,
    costs: LayoutCosts,
    memory_bytes: float,
) -> Simulated | None:
    """The layout with the fastest layers a stage that fit, found from its own split by moving one
    layer at a time to another stage; None where none is faster.

    Args:
        entry: a layout with at least two stages.
        memory_bytes: that a rank may use.
    """
    best = entry
    own = costs.layers_of_stages(entry.layout)
    starts = [own, costs.split_by_seconds(entry.layout)]
    for split in dict.fromkeys(starts):
        found = _descended(
            entry,
            split,
            costs,
            memory_bytes,
        )
        if _is_better(found, best, memory_bytes):
            best = found
    gain = 1 - best.seconds / entry.seconds
    has_gained = gain >= MIN_GAIN or entry.peak_bytes > memory_bytes
    return best if best is not entry and has_gained else None


def _descended(
    entry: Simulated,
    split: tuple[int, ...],
    costs: LayoutCosts,
    memory_bytes: float,
) -> Simulated:
    """The last of a row of splits, each of them better than the one before."""
    best = costs.simulate(replace(entry.layout, split=split))
    least = costs.least_layers(entry.layout)
    for _ in range(MOST_MOVES):
        for moved in moves(split, costs.stage_seconds(best.layout), least):
            found = costs.simulate(replace(entry.layout, split=moved))
            if _is_better(found, best, memory_bytes):
                best, split = found, moved
                break
        else:
            return best
    return best


def _is_better(
    one: Simulated,
    other: Simulated,
    memory_bytes: float,
) -> bool:
    """Whether one fits better, or is faster."""
    over, other_over = (max(0.0, each.peak_bytes - memory_bytes) for each in (one, other))
    return (over, one.seconds) < (other_over, other.seconds)


def moves(
    split: Sequence[int],
    work: Sequence[float],
    least: Sequence[int],
) -> Iterator[tuple[int, ...]]:
    """The splits with one layer moved from the first, the last or the busiest stage to another one,
    the least busy first.

    Args:
        split: layers of every stage.
        work: seconds of every stage.
        least: layers that every stage keeps.
    """
    stages = range(len(split))
    busiest = max(stages, key=lambda stage: work[stage])
    by_work = sorted(stages, key=lambda stage: work[stage])
    for source in dict.fromkeys((busiest, 0, len(split) - 1)):
        for target in by_work[:MOST_TARGETS]:
            if source != target and split[source] > least[source]:
                yield _moved(split, source, target)


MOST_TARGETS = 4
"""Stages to which a layer is moved, those with the least work."""


def _moved(
    split: Sequence[int],
    source: int,
    target: int,
) -> tuple[int, ...]:
    counts = list(split)
    counts[source] -= 1
    counts[target] += 1
    return tuple(counts)
