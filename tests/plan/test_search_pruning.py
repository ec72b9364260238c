"""What a search of layouts leaves out: bounds are not above what they bound, and no layout that may be the best is missed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest

from weft.config.hardware import find_hardware
from weft.config.layout_keys import LayoutKeys
from weft.config.load import load
from weft.models import FAMILIES
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.simulate.predict import Prediction
from weft.planner.simulate.speeds import Speeds
from weft.schedule.catalog import SCHEDULES
from weft_plan.search import limits
from weft_plan.search.candidates import Candidates, LayoutGroup, PipelineChoice, Space, candidates
from weft_plan.search.found_layouts import FoundLayouts
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_costs import Bound, LayoutCosts, Simulated
from weft_plan.search.limits import SearchLimits
from weft_plan.search.pipeline_tables import most_held_bytes
from weft_plan.search.search import PEAK_ERROR, search
from weft_plan.search.shardings import Sharding, holds_more, neighbours

BYTES = 100.0
"""Of a device."""
DP = Layout((("dp", 2),), recompute="full")
"""The layout that others of these tests differ from."""
PIPELINES = (PipelineChoice("1f1b", 1),)


def test_a_sharding_holds_more_with_larger_micro_batches_alone() -> None:
    tp = Layout((("tp", 2),), recompute="full", micro_size=2)
    assert holds_more(tp, tp)
    assert holds_more(replace(tp, micro_size=4), tp)
    assert not holds_more(replace(tp, micro_size=1), tp)
    for change in ({"recompute": "none"}, {"sequence": True}, {"degrees": (("tp", 4),)}):
        assert not holds_more(replace(tp, micro_size=4, **change), tp)


def test_a_schedule_has_no_more_samples_in_flight_in_smaller_micro_batches() -> None:
    """What `holds_more` relies on."""
    for schedule in SCHEDULES.values():
        for ranks, chunks, num_micro in schedule.sizes(ranks=4, chunks=3, microbatches=5):
            stages = [1] * (ranks * chunks)
            larger = most_held_bytes(schedule.table(ranks, chunks, num_micro), stages)
            smaller = most_held_bytes(schedule.table(ranks, chunks, 2 * num_micro), stages)
            for of_larger, of_smaller in zip(larger, smaller, strict=True):
                assert of_smaller.counts.total() <= 2 * of_larger.counts.total()


def test_neighbours_differ_in_one_option_and_the_nearest_micro_batch_is_first() -> None:
    best = replace(DP, micro_size=2, zero=3)
    bounds = {
        replace(DP, micro_size=8): 1.0,
        replace(DP, micro_size=1): 3.0,
        replace(DP, micro_size=4): 2.0,
        replace(DP, micro_size=2, recompute="none"): 9.0,
        replace(DP, micro_size=4, recompute="none"): 0.0,  # two options
        Layout((("tp", 2),), recompute="full", micro_size=2): 0.0,  # other degrees
    }
    waiting = []
    for place, (layout, bound) in enumerate(bounds.items()):
        waiting.append(Sharding(bound, (place,), layout.sharding, []))
    actual = []
    for sharding in neighbours(best, waiting):
        actual.append((sharding.key.recompute, sharding.key.micro_size))
    assert actual == [("none", 2), ("full", 4), ("full", 1), ("full", 8)]


class GivenCosts:
    """Costs as functions of a layout. A simulation takes a second of the search."""

    def __init__(
        self,
        *,
        seconds: Callable[[Layout], float],
        least_seconds: Callable[[Layout], float],
        num_bytes: Callable[[Layout], float],
    ) -> None:
        self.seconds = seconds
        self.least_seconds = least_seconds
        self.num_bytes = num_bytes
        self.clock_s = 0.0
        self.asked_peaks: set[Layout] = set()
        self.speeds = SimpleNamespace(hardware=SimpleNamespace(node=8))

    def leanest_pipeline(self, group: LayoutGroup, zero: int) -> PipelineChoice:
        return group.pipelines[0]

    def state_bytes(self, layout: Layout) -> float:
        return 0.0

    def group_bound(self, layout: Layout, most_chunks: int) -> float:
        return self.least_seconds(layout)

    def larger_blocks(self, layout: Layout) -> None:
        return None

    def blocks(self, layout: Layout) -> None:
        return None

    def least_peak(self, layout: Layout, costs: None) -> float:
        self.asked_peaks.add(layout)
        return self.num_bytes(layout)

    def bound(self, layout: Layout, costs: None) -> Bound:
        return Bound(self.least_seconds(layout), self.num_bytes(layout), 0.0)

    def simulate(self, layout: Layout) -> Simulated:
        self.clock_s += 1.0
        return Simulated(layout, self.seconds(layout), self.num_bytes(layout))

    def can_split(self, layout: Layout) -> bool:
        return False

    def can_be_measured(self, layout: Layout) -> bool:
        return True

    def predict(self, layout: Layout) -> Prediction:
        step = SimpleNamespace(total_s=self.seconds(layout))
        found = SimpleNamespace(step=step, peak_bytes=self.num_bytes(layout))
        return cast(Prediction, found)


def searched(
    costs: GivenCosts,
    groups: Iterable[LayoutGroup],
    patch: pytest.MonkeyPatch,
    *,
    seconds: float | None = None,
    has_front: bool = False,
) -> FoundLayouts:
    """The result of a search whose clock runs with the simulations."""
    patch.setattr(limits, "time", SimpleNamespace(process_time=lambda: costs.clock_s))
    found = Candidates(list(groups), SimpleNamespace())  # type: ignore[arg-type]
    ends = SearchLimits(BYTES, most_measured=1, seconds=seconds, has_front=has_front)
    return search(found, cast(LayoutCosts, costs), ends, target="time")


def groups_of(*layouts: Layout) -> list[LayoutGroup]:
    return [LayoutGroup(layout, PIPELINES, (0,)) for layout in layouts]


def test_layouts_beside_the_best_one_are_tried_after_the_ranking(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Larger micro-batches of the best layout are behind other shardings, for which there is no time."""
    wide = [Layout((("tp", 2**power),)) for power in range(1, 7)]
    larger = replace(DP, micro_size=2)
    seconds = {DP: 10.0, larger: 8.0}
    bounds = {DP: 1.0, larger: 5.0}
    costs = GivenCosts(
        seconds=lambda layout: seconds.get(layout, 20.0),
        least_seconds=lambda layout: bounds.get(layout, 2.0),
        num_bytes=lambda layout: 10.0,
    )
    result = searched(costs, groups_of(DP, larger, *wide), monkeypatch, seconds=10.0)
    assert result.is_out_of_time
    assert result.best[0].layout == larger


def test_layouts_of_the_ranking_by_memory_that_may_be_the_fastest_are_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beside a lean layout of their sharding they are no candidates for the lean end of the front."""
    wide = [Layout((("tp", 2**power),)) for power in range(1, 8)]
    fat = replace(DP, zero=0)
    lean = replace(DP, zero=3)
    seconds = {fat: 5.0, lean: 20.0}
    num_bytes = {fat: 90.0, lean: 1.0}
    costs = GivenCosts(
        seconds=lambda layout: seconds.get(layout, 10.0),
        least_seconds=lambda layout: 4.0 if layout.degree("dp") > 1 else 2.0,
        num_bytes=lambda layout: num_bytes.get(layout, 50.0),
    )
    both = LayoutGroup(DP, PIPELINES, (0, 3))
    groups = [*groups_of(*wide), both]
    costs.state_bytes = lambda layout: num_bytes.get(layout, 50.0)  # type: ignore[method-assign]
    result = searched(costs, groups, monkeypatch, seconds=10.0, has_front=True)
    assert result.best[0].layout == fat


def test_shardings_that_hold_more_than_one_that_does_not_fit_are_left_out_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less recomputation of micro-batches of the same size is looked at: where one layer is in
    flight, recomputing it takes more memory than keeping its activations.
    """
    sizes = [replace(DP, micro_size=size) for size in (1, 2, 4)]
    kept = replace(DP, recompute="none")
    costs = GivenCosts(
        seconds=lambda layout: 10.0,
        least_seconds=lambda layout: float(layout.micro_size),
        num_bytes=lambda layout: 90.0 if layout == kept else 120.0 * layout.micro_size,
    )
    result = searched(costs, groups_of(*sizes, kept), monkeypatch)
    assert costs.asked_peaks == {DP, kept}
    assert [entry.layout for entry in result.best] == [kept]
    assert result.rejected["do not fit: with the activations in flight"] == 3


def test_a_bound_of_memory_a_little_above_the_device_rejects_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bounds from larger blocks were up to 4.6% above those from the layout's own blocks."""
    costs = GivenCosts(
        seconds=lambda layout: 10.0, least_seconds=lambda layout: 1.0, num_bytes=lambda layout: 99.0
    )
    costs.least_peak = lambda layout, blocks: 104.0  # type: ignore[method-assign]
    assert [entry.layout for entry in searched(costs, groups_of(DP), monkeypatch).best] == [DP]


def least_bytes(costs: LayoutCosts, groups: Iterable[LayoutGroup]) -> dict[Layout, float]:
    """What the layouts of each sharding need at least, from larger blocks."""
    found: dict[Layout, float] = {}
    for group in groups:
        blocks = costs.larger_blocks(group.base)
        peaks = [costs.least_peak(layout, blocks) for layout in group]
        key = group.base.sharding
        found[key] = min(*peaks, found.get(key, float("inf")))
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "words",
    [
        "--model.name gpt2 --parallel.zero 1 --batch.global_size 16",
        "--model.layers 4 --model.dim 2048 --model.ffn 8192 --model.heads 16 --model.kv_heads 16"
        " --data.seq_len 8192 --parallel.zero 3 --batch.global_size 16 --precision.compute bfloat16",
    ],
)
def test_bounds_are_not_above_what_they_bound(words: str) -> None:
    """Of the layouts on 8 devices: seconds and bytes from larger blocks, bytes from own blocks, states
    of a group, and the order of shardings by `holds_more`.
    """
    run = load(words.split(), FAMILIES)
    costs = LayoutCosts(MeasuredRun.of(run), Speeds(find_hardware("h100")))
    pinned = frozenset({"parallel.context", "parallel.zero"})
    groups = candidates(LayoutKeys.of(run), Space(8, 8, pinned)).groups
    least = least_bytes(costs, groups)
    for key, other in itertools.permutations(least, 2):
        if holds_more(key, other):
            assert least[key] >= least[other]
    for group in groups:
        most_chunks = max(pipeline.chunks for pipeline in group.pipelines)
        least_s = costs.group_bound(group.base, most_chunks)
        larger = costs.larger_blocks(group.base)
        for layout in group:
            simulated = costs.simulate(layout)
            assert least_s <= simulated.seconds * (1 + 1e-9)
            own_bytes = costs.least_peak(layout, costs.blocks(layout))
            assert own_bytes <= simulated.peak_bytes
            assert costs.least_peak(layout, larger) <= (1 + PEAK_ERROR) * own_bytes
            leanest = costs.leanest_pipeline(group, layout.zero)
            states = costs.state_bytes(group.layout(leanest, layout.zero))
            assert states <= costs.state_bytes(layout)


@pytest.mark.slow
def test_of_the_schedules_of_a_group_the_one_with_the_smallest_states_decides() -> None:
    """With experts it is not the one with the fewest parameters: fewer ranks share an expert's states."""
    words = "--model.preset deepseek-16b --batch.global_size 64"
    run = load(words.split(), FAMILIES)
    costs = LayoutCosts(MeasuredRun.of(run), Speeds(find_hardware("h100")))
    for group in candidates(LayoutKeys.of(run), Space(32, 8)).groups:
        for zero in group.zeros:
            leanest = costs.leanest_pipeline(group, zero)
            states = costs.state_bytes(group.layout(leanest, zero))
            of_all = [costs.state_bytes(group.layout(other, zero)) for other in group.pipelines]
            assert states == min(of_all)
