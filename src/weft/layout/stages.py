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


def split_by_cost(blocks: Sequence[BlockSpec], num_stages: int) -> tuple[tuple[str, ...], ...]:
    """Names of consecutive blocks for each stage, so that the cost of the slowest stage is
    smallest.

    Every stage gets at least one layer; blocks before the first layer (embedding) stay on the first
    stage and blocks after the last (head, loss) on the last. Only where there are one or two stages
    more than layers, these blocks are stages of their own. Among equally good splits the sum of
    squares decides, then lighter first stages: the first stage holds the embedding and the most
    activations.

    Raises:
        PlanError: when there are more stages than layers, the first and the last stage aside.
    """
    check_number_of_stages(blocks, num_stages)
    chain = _layered(blocks)
    missing = num_stages - len(chain.layers)
    if missing <= 0:
        counts = _balanced_counts(chain, num_stages)
    else:
        counts = _one_layer_a_stage(chain, ends_without=missing)
    return _names_by_counts(chain, counts)


def check_stage_limit(num_stages: int) -> None:
    """Check that there are not too many stages for any model.

    Raises:
        PlanError: there are more than `MAX_STAGES`.
    """
    if num_stages > MAX_STAGES:
        fault = Fault(
            "mesh", "too many stages", got=f"{num_stages} stages", need=f"at most {MAX_STAGES}"
        )
        raise PlanError(fault)


def check_number_of_stages(blocks: Sequence[BlockSpec], num_stages: int) -> None:
    """Check that there is a layer for every stage but those that the ends of the chain can be.

    Raises:
        PlanError: when there are more stages than that, or than `MAX_STAGES`.
    """
    check_stage_limit(num_stages)
    chain = _layered(blocks)
    num_layers = len(chain.layers)
    most = most_stages(blocks)
    if num_stages > most:
        fills_ranks = num_stages % max(num_layers, 1) == 0
        stages = counted(num_stages, "stage")
        layers = counted(num_layers, "layer")
        fault = Fault(
            "pipeline.chunks" if fills_ranks else "mesh",
            "more stages than layers",
            got=f"{stages}, {layers}",
            need=f"at most {counted(most, 'stage')}{_ends_text(chain)}",
            fix="use fewer pipeline ranks or chunks, or more layers",
        )
        raise PlanError(fault)


def split_by_counts(
    blocks: Sequence[BlockSpec], counts: Sequence[int]
) -> tuple[tuple[str, ...], ...]:
    """Names of blocks for each stage, where `counts` says how many layers each stage gets.

    The first stage may have none, where blocks precede the layers (embedding), and the last one,
    where blocks besides the loss follow them (head).

    Raises:
        PlanError: when the counts do not add up to the number of layers, or another stage gets
            none.
    """
    chain = _layered(blocks)
    num_layers = len(chain.layers)
    total = sum(counts)
    given = " ".join(map(str, counts))
    if total != num_layers or min(counts, default=0) < 0:
        fault = Fault(
            "pipeline.split",
            "the layers of the stages do not add up",
            got=f"{given}, together {total}",
            need=f"{counted(num_layers, 'layer')}, at least one a stage{_zero_text(chain)}",
            fix="give one number of layers per stage",
        )
        raise PlanError(fault)
    least = least_layers(blocks, len(counts))
    for stage, count in enumerate(counts):
        if count < least[stage]:
            fault = Fault(
                "pipeline.split",
                f"stage {stage} has no layer",
                got=given,
                need=f"at least one layer a stage{_zero_text(chain)}",
                fix="give one number of layers per stage",
            )
            raise PlanError(fault)
    return _names_by_counts(chain, counts)


def most_stages(blocks: Sequence[BlockSpec]) -> int:
    """Stages of a model at most: its layers, and the ends that other blocks can fill."""
    chain = _layered(blocks)
    return len(chain.layers) + chain.can_lack_layers.count(True)


def least_layers(blocks: Sequence[BlockSpec], num_stages: int) -> tuple[int, ...]:
    """Fewest layers of every stage: 0 for the ends that other blocks can fill, 1 for the rest."""
    first, last = _layered(blocks).can_lack_layers
    least = [1] * num_stages
    if num_stages > 1:
        least[0] = 0 if first else 1
        least[-1] = 0 if last else 1
    return tuple(least)


class _LayeredChain(NamedTuple):
    """The blocks of a model: those before the first layer, every layer (with the blocks between it
    and the next one), those after the last layer.
    """

    before: tuple[BlockSpec, ...]
    layers: tuple[tuple[BlockSpec, ...], ...]
    after: tuple[BlockSpec, ...]

    @property
    def can_lack_layers(self) -> tuple[bool, bool]:
        """Whether the first stage, and the last one, can do without a layer: the loss alone is no
        stage.
        """
        return bool(self.before), len(self.after) > 1


def _layered(blocks: Sequence[BlockSpec]) -> _LayeredChain:
    """Blocks by layer; a chain without layers counts as one layer."""
    places = [place for place, block in enumerate(blocks) if block.is_layer]
    if not places:
        return _LayeredChain((), (tuple(blocks),), ())
    first = places[0]
    end = places[-1] + 1
    layers: list[tuple[BlockSpec, ...]] = []
    for start, stop in itertools.pairwise([*places, end]):
        layers.append(tuple(blocks[start:stop]))
    return _LayeredChain(
        before=tuple(blocks[:first]), layers=tuple(layers), after=tuple(blocks[end:])
    )


def _names_by_counts(chain: _LayeredChain, counts: Sequence[int]) -> tuple[tuple[str, ...], ...]:
    """Names of the blocks of every stage with so many layers."""
    stages: list[list[str]] = []
    layers = iter(chain.layers)
    for count in counts:
        names: list[str] = []
        for layer in itertools.islice(layers, count):
            names.extend(block.name for block in layer)
        stages.append(names)
    stages[0][:0] = [block.name for block in chain.before]
    stages[-1].extend(block.name for block in chain.after)
    return tuple(map(tuple, stages))


def _ends_text(chain: _LayeredChain) -> str:
    """What the stages can hold besides layers, behind a number of them."""
    ends: list[str] = []
    if chain.can_lack_layers[0]:
        ends.append(chain.before[0].name)
    if chain.can_lack_layers[1]:
        ends.append(chain.after[-2].name)
    if not ends:
        return ""
    return f": the layers, {' and '.join(ends)}"


def _zero_text(chain: _LayeredChain) -> str:
    """Which numbers of layers may be 0."""
    first, last = chain.can_lack_layers
    if first and last:
        return "; the first and the last may be 0"
    if first or last:
        return f"; the {'first' if first else 'last'} may be 0"
    return ""


def _balanced_counts(chain: _LayeredChain, num_stages: int) -> tuple[int, ...]:
    """Layers of every stage, at least one, so that the slowest stage costs least."""
    costs = _layer_costs(chain)
    costs[0] += _cost(chain.before)
    costs[-1] += _cost(chain.after)
    whole_costs = tuple(round(cost) for cost in costs)
    bounds = _balanced_bounds(whole_costs, num_stages)
    counts = []
    for start, stop in itertools.pairwise(bounds):
        counts.append(stop - start)
    return tuple(counts)


def _one_layer_a_stage(chain: _LayeredChain, *, ends_without: int) -> tuple[int, ...]:
    """One layer on every stage but both ends, or but the one that leaves the cheaper slowest
    stage; the first where both are equal.
    """
    ones = (1,) * len(chain.layers)
    if ends_without == 2:
        return (0, *ones, 0)
    can_lack_first, can_lack_last = chain.can_lack_layers
    layers = _layer_costs(chain)
    before = _cost(chain.before)
    after = _cost(chain.after)
    slowest_without_first = max(before, *layers[:-1], layers[-1] + after)
    slowest_without_last = max(before + layers[0], *layers[1:], after)
    prefers_first = slowest_without_first <= slowest_without_last
    if can_lack_first and (prefers_first or not can_lack_last):
        return (0, *ones)
    return (*ones, 0)


def _layer_costs(chain: _LayeredChain) -> list[float]:
    return [_cost(layer) for layer in chain.layers]


def _cost(blocks: Sequence[BlockSpec]) -> float:
    return sum(block.flops for block in blocks)


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


def _possible_starts(prefix: tuple[int, ...], part: int, parts: int, *, most: int) -> range:
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
    prefix: tuple[int, ...], starts: range, squares: dict[int, int], *, most: int
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
