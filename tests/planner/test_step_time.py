"""Predicted times: kernels and collectives on their lanes, messages inside and between nodes, the step of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.test_step_costs import run_of
from weft.comm.observe import Operation
from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware
from weft.planner.measure.kernels import KernelLaunch
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.recorder import Ended, RecordedRegion, Started
from weft.planner.measure.roles import measure
from weft.planner.simulate.region_time import RegionTime, region_time
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import step_time
from weft.schedule.timeline import bubble, makespan

H100 = find_hardware("h100")
IDEAL = Efficiency(
    gemm=1.0,
    attention=1.0,
    memory=1.0,
    launch_s=0.0,
    link=1.0,
    network=1.0,
    latency_s=0.0,
    network_latency_s=0.0,
)
SPEEDS = Speeds(H100.with_efficiency(IDEAL))
SECOND_OF_KERNEL = KernelLaunch("memory", "float32", 0, int(H100.hbm_tb_s * 1e12))
SECOND_OF_LINK = int(H100.link_gb_s * 1e9)


def all_reduce(seconds: float, axis: str = "dp", group: tuple[int, ...] = (0, 1)) -> Operation:
    sent = int(seconds * SECOND_OF_LINK)
    return Operation("all_reduce", axis, group, rank=0, payload_bytes=sent, sent_bytes=sent)


def region(*events: object) -> RecordedRegion:
    return RecordedRegion("B0.0", 0, events=list(events))  # type: ignore[arg-type]


def time_beside_kernel(op: Operation, speeds: Speeds = SPEEDS) -> RegionTime:
    """An operation that is started before a kernel of one second, and waited for after it."""
    return region_time(region(Started(op), SECOND_OF_KERNEL, Ended(op)), speeds)


def test_a_kernel_takes_flops_and_bytes_at_the_speeds_of_the_device() -> None:
    flops = int(H100.bf16_tflops * 1e12)
    num_bytes = int(H100.hbm_tb_s * 1e12)
    product = KernelLaunch("gemm", "bfloat16", flops, num_bytes)
    assert SPEEDS.kernel_s(product) == pytest.approx(2.0)
    half = Speeds(H100.with_efficiency(replace(IDEAL, gemm=0.5)))
    assert half.kernel_s(product) == pytest.approx(3.0)


def test_no_kernel_takes_less_than_its_launch() -> None:
    slow_host = Speeds(H100.with_efficiency(replace(IDEAL, launch_s=100.0)))
    assert slow_host.kernel_s(SECOND_OF_KERNEL) == pytest.approx(100.0)
    equal = Speeds(H100.with_efficiency(replace(IDEAL, launch_s=1.0)))
    assert equal.kernel_s(SECOND_OF_KERNEL) == pytest.approx(2 ** (1 / 4))


def test_a_collective_overlaps_with_what_lies_between_its_start_and_its_wait() -> None:
    hidden = time_beside_kernel(all_reduce(0.5))
    assert hidden.total == pytest.approx(1.0)
    assert hidden.exposed == {"dp": 0.0}
    longer = time_beside_kernel(all_reduce(3.0))
    assert longer.total == pytest.approx(3.0)
    assert longer.exposed["dp"] == pytest.approx(2.0)


def test_what_is_not_waited_for_is_still_under_way() -> None:
    op = all_reduce(3.0)
    time = region_time(region(Started(op), SECOND_OF_KERNEL), SPEEDS)
    assert time.total == pytest.approx(1.0)
    assert time.under_way == pytest.approx(2.0)


def test_a_group_of_several_nodes_takes_the_network() -> None:
    inside = SPEEDS.operation_s(all_reduce(1.0, group=(0, 1)))
    between = SPEEDS.operation_s(all_reduce(1.0, group=(0, 8)))
    assert between == pytest.approx(inside * H100.link_gb_s / H100.network_gb_s)
    assert SPEEDS.message_s(10**9, 0, 7) < SPEEDS.message_s(10**9, 0, 8)


def test_the_step_of_a_run() -> None:
    run = run_of("--mesh pp2,dp2 --parallel.zero 1")
    roles = measure(MeasuredRun.of(run))
    time = step_time(roles, SPEEDS)
    parts = time.targets_s + time.pipeline_s + time.reduce_s + time.update_s
    assert time.total_s == pytest.approx(parts)
    expected = sum(role.flops * role.num_ranks for role in roles)
    assert time.flops == expected
    assert 0 < time.bubble < 1
    fp32_tflops = H100.tflops("float32") / 2
    half = replace(H100, hbm_tb_s=H100.hbm_tb_s / 2, fp32_tflops=fp32_tflops)
    speeds = Speeds(half.with_efficiency(IDEAL))
    slower = step_time(roles, speeds)
    assert time.update_s < slower.update_s <= 2 * time.update_s
    assert time.pipeline_s < slower.pipeline_s <= 2 * time.pipeline_s


def test_kernels_beside_a_collective_lose_a_share_of_its_time() -> None:
    slowed = Speeds(H100.with_efficiency(replace(IDEAL, overlap_slowdown=0.4)))
    hidden = time_beside_kernel(all_reduce(0.5), slowed)
    assert hidden.total == pytest.approx(1.2)
    op = all_reduce(0.5)
    exposed = region_time(region(Started(op), Ended(op), SECOND_OF_KERNEL), slowed)
    assert exposed.total == pytest.approx(1.5)


def test_a_product_with_few_outputs_reaches_less_of_the_peak() -> None:
    flops = int(H100.bf16_tflops * 1e12)
    product = KernelLaunch("gemm", "bfloat16", flops, 0, (1, 100, 10, 10))
    half = Speeds(H100.with_efficiency(replace(IDEAL, gemm_half=1000)))
    assert half.kernel_s(product) == pytest.approx(2.0)


def test_attention_that_is_not_fused_moves_its_scores() -> None:
    heads, queries, keys = 2, 30, 30
    scores = heads * queries * keys
    flops_of_one_product = 2 * scores * 64
    forward = KernelLaunch("attention", "bfloat16", flops_of_one_product, 0, (2, 30, 30, 64))
    backward = replace(forward, flops=5 * flops_of_one_product // 2)
    fused = Speeds(H100.with_efficiency(IDEAL))
    unfused = replace(IDEAL, score_bytes=8.0)
    moving = Speeds(H100.with_efficiency(unfused))
    seconds_of_scores = 8 * scores / (H100.hbm_tb_s * 1e12)
    extra = moving.kernel_s(forward) - fused.kernel_s(forward)
    assert extra == pytest.approx(seconds_of_scores)
    extra = moving.kernel_s(backward) - fused.kernel_s(backward)
    assert extra == pytest.approx(2.5 * seconds_of_scores)


@pytest.mark.parametrize("zero", [1, 3])
def test_the_step_is_as_long_as_its_timeline_of_all_lanes(zero: int) -> None:
    run = run_of(f"--mesh pp2,dp2 --parallel.zero {zero}")
    roles = measure(MeasuredRun.of(run))
    time = step_time(roles, SPEEDS)
    whole = time.whole_timeline
    assert makespan(whole) == pytest.approx(time.total_s)
    assert makespan(time.timeline) == pytest.approx(time.pipeline_s)
    assert time.bubble == pytest.approx(bubble(time.timeline))
    lanes = {span.lane for span in whole.spans}
    assert lanes >= {"kernels", "dp", "pp to 1", "pp to 0"}
    for rank in range(2):
        end_of_lane: dict[str, float] = {}
        for span in whole.by_rank[rank]:
            earlier_end = end_of_lane.get(span.lane, 0.0)
            assert span.start >= earlier_end - 1e-12, span
            end_of_lane[span.lane] = span.end


def test_reductions_of_zero_2_overlap_with_the_next_micro_batch() -> None:
    """A reduction that ends before the next backward is waited for without exposed time."""
    roles = measure(MeasuredRun.of(run_of("--mesh pp2,dp2 --parallel.zero 2")))
    instant = replace(IDEAL, launch_s=1e-3)
    speeds = Speeds(H100.with_efficiency(instant))
    hidden = step_time(roles, speeds)
    assert hidden.exposed_s.get("dp", 0.0) == 0.0
    slow_links = replace(H100, link_gb_s=H100.link_gb_s * 1e-7)
    exposed = step_time(roles, Speeds(slow_links.with_efficiency(instant)))
    assert exposed.exposed_s["dp"] > 0.0
    assert exposed.total_s > hidden.total_s
