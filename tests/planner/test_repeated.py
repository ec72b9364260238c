"""Costs of deep stages from five equal blocks equal those of all blocks: memory, kernels, operations and their waits."""

from __future__ import annotations

import pytest

from tests.planner.test_step_costs import run_of
from weft.config.run import Run, plan_of
from weft.layout.plan import Plan
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.recorder import KernelLaunch, RecordedRegion, Started
from weft.planner.measure.repeated import measure_repeated
from weft.planner.measure.step_memory import step_memory
from weft.planner.measure.step_traffic import step_traffic

WIDE = "--model.layers {} --model.dim 2048 --model.ffn 8192 --batch.micro_size 1 --data.seq_len 16"
LAYOUTS = {
    "dp2 zero2": (8, "--mesh dp2 --parallel.zero 2"),
    "dp2 zero0": (8, "--mesh dp2"),
    "dp2 tp2 zero3 sequence full": (
        8,
        "--mesh dp2,tp2 --parallel.zero 3 --parallel.sequence True --parallel.recompute full",
    ),
    "pp2 dp2 zero1 zero_bubble": (
        16,
        "--mesh pp2,dp2 --parallel.zero 1 --pipeline.schedule zero_bubble",
    ),
    "pp2 cp2 interleaved": (
        28,
        "--mesh pp2,cp2 --parallel.zero 1 --pipeline.schedule interleaved --pipeline.chunks 2",
    ),
}
STACKED_NUMBERS = 8192
"""Bytes of the numbers that the norm stacks, whose peak lies at another place with more blocks."""


class CountedMeasurement:
    """`measure_rank` of one rank, with the number of its calls."""

    def __init__(self, run: Run, rank: int) -> None:
        self.run = MeasuredRun.of(run)
        self.rank = rank
        self.count = 0

    def __call__(self, plan: Plan) -> RankStep:
        self.count += 1
        return measure_rank(self.run.with_plan(plan), self.rank)


def events_of(region: RecordedRegion) -> list[object]:
    """Kernels, and operations with the number of the start that each wait is for."""
    numbers: dict[int, int] = {}
    found: list[object] = []
    for event in region.events:
        if isinstance(event, KernelLaunch):
            found.append(event)
            continue
        if isinstance(event, Started):
            numbers[id(event.op)] = len(numbers)
        number = numbers.get(id(event.op))
        found.append((type(event), event.op, number))
    return found


def assert_equal_regions(short: RecordedRegion, whole: RecordedRegion) -> None:
    assert events_of(short) == events_of(whole)
    assert short.change == whole.change


def assert_equal(short: RankStep, whole: RankStep) -> None:
    assert short.kept == whole.kept
    assert short.actions.keys() == whole.actions.keys()
    for key, region in whole.actions.items():
        other = short.actions[key]
        assert_equal_regions(other, region)
        assert other.workspace == region.workspace
        assert other.peak_block == region.peak_block
    for name, region in whole.phases.items():
        other = short.phases[name]
        assert_equal_regions(other, region)
        difference = abs(other.workspace - region.workspace)
        assert difference < STACKED_NUMBERS
    memory = step_memory(short, short.row)
    expected_memory = step_memory(whole, whole.row)
    assert memory.peak == expected_memory.peak
    assert step_traffic(short, short.row) == step_traffic(whole, whole.row)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_five_blocks_stand_for_all(name: str) -> None:
    num_layers, flags = LAYOUTS[name]
    run = run_of(f"{flags} --batch.global_size 16 {WIDE.format(num_layers)}")
    plan = plan_of(run)
    kinds = MeasuredRun.of(run).block_kinds()
    for row in range(plan.pipeline_size):
        rank = plan.mesh.rank(pp=row)
        whole = measure_rank(MeasuredRun.of(run), rank)
        measured = CountedMeasurement(run, rank)
        short = measure_repeated(plan, row, kinds, measured)
        assert measured.count == 2  # a short stage and one with a block more
        assert_equal(short, whole)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_buckets_of_several_blocks_are_measured_with_all_blocks(schedule: str) -> None:
    narrow = "--model.layers 8 --model.dim 256 --model.ffn 5120 --data.seq_len 16"
    run = run_of(f"--mesh dp2 --pipeline.schedule {schedule} --batch.global_size 2 {narrow}")
    plan = plan_of(run)
    kinds = MeasuredRun.of(run).block_kinds()
    measured = CountedMeasurement(run, rank=0)
    short = measure_repeated(plan, 0, kinds, measured)
    assert_equal(short, measure_rank(MeasuredRun.of(run), 0))
