"""Owns the cut of a model's blocks into pipeline stages, by cost or as the user says."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

from weft.core.model_config import BlockSpec
from weft.errors import Fault, PlanError


def split_by_cost(blocks: Sequence[BlockSpec], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Names of consecutive blocks for each stage, so that the dearest stage is as cheap as possible.

    Every stage gets at least one layer; what comes before the first layer (embedding) stays on the first stage and what
    comes after the last (head, loss) on the last. Among equally good cuts the sum of squares decides, then the lighter
    first stages win: the first stage holds the embedding and the most activations.

    Raises:
        PlanError: when there are more stages than layers.
    """
    units = _layer_units(blocks)
    if num_stages > len(units):
        raise PlanError(
            Fault(
                "pipeline.chunks" if num_stages % max(len(units), 1) == 0 else "mesh",
                "more stages than layers",
                got=f"{num_stages} stages, {len(units)} layers",
                need=f"at most {len(units)} stages",
                fix="use fewer pipeline ranks or chunks, or more layers",
            )
        )
    costs = tuple(round(sum(block.flops for block in unit)) for unit in units)
    bounds = _balanced_bounds(costs, num_stages)
    return tuple(tuple(block.name for unit in units[lo:hi] for block in unit) for lo, hi in itertools.pairwise(bounds))


def split_by_counts(blocks: Sequence[BlockSpec], counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Names of blocks for each stage, where `counts` says how many layers each stage gets.

    Raises:
        PlanError: when the counts do not add up to the number of layers, or a stage gets none.
    """
    units = _layer_units(blocks)
    if sum(counts) != len(units) or min(counts, default=0) < 1:
        raise PlanError(
            Fault(
                "pipeline.split",
                "the layers of the stages do not add up",
                got=f"{' '.join(map(str, counts))}, together {sum(counts)}",
                need=f"{len(units)} layers, at least one a stage",
                fix="give one number of layers per stage",
            )
        )
    bounds = tuple(itertools.accumulate(counts, initial=0))
    return tuple(tuple(block.name for unit in units[lo:hi] for block in unit) for lo, hi in itertools.pairwise(bounds))


def _layer_units(blocks: Sequence[BlockSpec]) -> tuple[tuple[BlockSpec, ...], ...]:
    """Blocks grouped so that each group holds one layer: leading blocks join the first, trailing ones the last layer."""
    places = [place for place, block in enumerate(blocks) if block.is_layer]
    if not places:
        return (tuple(blocks),)
    bounds = [0, *places[1:], len(blocks)]
    return tuple(tuple(blocks[lo:hi]) for lo, hi in itertools.pairwise(bounds))


def _balanced_bounds(costs: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Bounds of `parts` runs of `costs`: least maximum, then least sum of squares, then shorter runs first."""
    prefix = tuple(itertools.accumulate(costs, initial=0))
    most = _least_maximum(costs, parts)

    @cache
    def best(start: int, parts: int) -> tuple[int, tuple[int, ...]] | None:
        """Sum of squares and bounds of the best cut of what is left into runs of at most `most`, if there is one."""
        if parts == 1:
            cost = prefix[-1] - prefix[start]
            return (cost**2, (start, len(costs))) if cost <= most else None
        choices = []
        for stop in range(start + 1, len(costs) - parts + 2):
            cost = prefix[stop] - prefix[start]
            if cost > most:
                break
            if (rest := best(stop, parts - 1)) is not None:
                choices.append((rest[0] + cost**2, (start, *rest[1])))
        return min(choices, default=None)

    found = best(0, parts)
    assert found is not None, "the least maximum can be reached"
    return found[1]


def _least_maximum(costs: tuple[int, ...], parts: int) -> int:
    """Cost of the dearest run in the cut of `costs` into `parts` runs where it is cheapest."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _num_runs(costs, middle) <= parts else (middle + 1, high)
    return low


def _num_runs(costs: tuple[int, ...], most: int) -> int:
    """Fewest runs of at most `most` each."""
    runs, room = 1, most
    for cost in costs:
        if cost > room:
            runs, room = runs + 1, most
        room -= cost
    return runs
