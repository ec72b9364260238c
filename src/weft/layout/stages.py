"""Split of a model's blocks into pipeline stages: balanced by cost, or by given layer counts."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from weft.core.model_config import BlockSpec
from weft.errors import Fault, PlanError, counted

MAX_STAGES = 512
"""Pipeline stages of a model."""


def split_by_cost(
    blocks: Sequence[BlockSpec],
    num_stages: int,
) -> tuple[tuple[str, ...], ...]:
    """Names of consecutive blocks for each stage, so that the cost of the slowest stage is
    smallest.

    Every stage gets at least one layer; blocks before the first layer (embedding) stay on the first
    stage and blocks after the last (head, loss) on the last. Among equally good splits the sum of
    squares decides, then lighter first
    stages: the first stage holds the embedding and the most activations.

    Raises:
        PlanError: when there are more stages than layers.
    """
    check_number_of_stages(blocks, num_stages)
    units = _layer_units(blocks)
    costs: list[int] = []
    for unit in units:
        flops = sum(block.flops for block in unit)
        costs.append(round(flops))
    bounds = _balanced_bounds(tuple(costs), num_stages)
    return _names_between(units, bounds)


def check_stage_limit(num_stages: int) -> None:
    """Check that there are not too many stages for any model.

    Raises:
        PlanError: there are more than `MAX_STAGES`.
    """
    if num_stages > MAX_STAGES:
        fault = Fault(
            "mesh",
            "too many stages",
            got=f"{num_stages} stages",
            need=f"at most {MAX_STAGES}",
        )
        raise PlanError(fault)


def check_number_of_stages(blocks: Sequence[BlockSpec], num_stages: int) -> None:
    """Check that there is a layer for every stage.

    Raises:
        PlanError: when there are more stages than layers, or than `MAX_STAGES`.
    """
    check_stage_limit(num_stages)
    num_layers = len(_layer_units(blocks))
    if num_stages > num_layers:
        fills_ranks = num_stages % max(num_layers, 1) == 0
        stages = counted(num_stages, "stage")
        layers = counted(num_layers, "layer")
        fault = Fault(
            "pipeline.chunks" if fills_ranks else "mesh",
            "more stages than layers",
            got=f"{stages}, {layers}",
            need=f"at most {counted(num_layers, 'stage')}",
            fix="use fewer pipeline ranks or chunks, or more layers",
        )
        raise PlanError(fault)


def split_by_counts(
    blocks: Sequence[BlockSpec],
    counts: Sequence[int],
) -> tuple[tuple[str, ...], ...]:
    """Names of blocks for each stage, where `counts` says how many layers each stage gets.

    Raises:
        PlanError: when the counts do not add up to the number of layers, or a stage gets none.
    """
    units = _layer_units(blocks)
    num_layers = len(units)
    total = sum(counts)
    fewest = min(counts, default=0)
    if total != num_layers or fewest < 1:
        given = " ".join(map(str, counts))
        fault = Fault(
            "pipeline.split",
            "the layers of the stages do not add up",
            got=f"{given}, together {total}",
            need=f"{counted(num_layers, 'layer')}, at least one a stage",
            fix="give one number of layers per stage",
        )
        raise PlanError(fault)
    bounds = tuple(itertools.accumulate(counts, initial=0))
    return _names_between(units, bounds)


def _names_between(
    units: Sequence[Sequence[BlockSpec]],
    bounds: Sequence[int],
) -> tuple[tuple[str, ...], ...]:
    """Names of the blocks of each run of units, `bounds[i]` to `bounds[i + 1]`."""
    runs: list[tuple[str, ...]] = []
    for lo, hi in itertools.pairwise(bounds):
        names: list[str] = []
        for unit in units[lo:hi]:
            for block in unit:
                names.append(block.name)
        runs.append(tuple(names))
    return tuple(runs)


def _layer_units(blocks: Sequence[BlockSpec]) -> tuple[tuple[BlockSpec, ...], ...]:
    """Blocks grouped so that each group holds one layer: leading blocks join the first, trailing
    ones the last layer.
    """
    units: list[list[BlockSpec]] = [[]]
    has_layer = False
    for block in blocks:
        if block.is_layer and has_layer:
            units.append([])
        has_layer = has_layer or block.is_layer
        units[-1].append(block)
    return tuple(map(tuple, units))


def _balanced_bounds(costs: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Bounds of `parts` runs of `costs`: least maximum, then least sum of squares, then shorter
    runs first.
    """
    num_costs = len(costs)
    prefix = tuple(itertools.accumulate(costs, initial=0))
    most = _least_maximum(costs, parts)
    # Backwards over the runs: for each start of the runs from `part` on, the least sum of squares
    # and where the first of them stops. Starts from which, or up to which, no split keeps below
    # `most` are left out.
    squares = {num_costs: 0}
    stops: list[dict[int, int]] = []
    for part in reversed(range(parts)):
        starts = _possible_starts(prefix, part, parts, most=most)
        found = _best_stops(prefix, starts, squares, most=most)
        squares = {start: best.squares for start, best in found.items()}
        stops.append({start: best.stop for start, best in found.items()})
    assert 0 in squares, "the least maximum can be reached"
    bounds = [0]
    for best_stop in reversed(stops):
        start = bounds[-1]
        bounds.append(best_stop[start])
    return tuple(bounds)


def _possible_starts(
    prefix: tuple[int, ...],
    part: int,
    parts: int,
    *,
    most: int,
) -> range:
    """Where run `part` may start, so that the runs before it and those from it on can keep below
    `most`, each with one entry at least.
    """
    num_costs = len(prefix) - 1
    runs_left = parts - part
    least_before = prefix[-1] - runs_left * most
    first = max(part, bisect_left(prefix, least_before))
    most_before = part * most
    last = min(bisect_right(prefix, most_before) - 1, num_costs - runs_left)
    return range(first, last + 1)


class _BestRun(NamedTuple):
    """The best run from one start: where it stops, and the sum of squares from its start on."""

    stop: int
    squares: int


def _best_stops(
    prefix: tuple[int, ...],
    starts: range,
    squares: dict[int, int],
    *,
    most: int,
) -> dict[int, _BestRun]:
    """The best run of at most `most` from each start; `squares` are those from each stop on."""
    found: dict[int, _BestRun] = {}
    for start in starts:
        for stop in range(start + 1, len(prefix)):
            cost = prefix[stop] - prefix[start]
            if cost > most:
                break
            if stop not in squares:
                continue
            total = squares[stop] + cost**2
            best = found.get(start)
            if best is None or total < best.squares:
                found[start] = _BestRun(stop, total)
    return found


def _least_maximum(costs: tuple[int, ...], parts: int) -> int:
    """Smallest possible cost of the largest of `parts` runs, by bisection."""
    low = max(costs)
    high = sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _num_runs(costs, middle) <= parts:
            high = middle
        else:
            low = middle + 1
    return low


def _num_runs(costs: tuple[int, ...], most: int) -> int:
    """Fewest runs of at most `most` each."""
    runs = 1
    room = most
    for cost in costs:
        if cost > room:
            runs += 1
            room = most
        room -= cost
    return runs
