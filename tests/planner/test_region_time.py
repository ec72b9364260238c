"""Replay of regions on lanes and shared links, against times computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.comm.observe import Operation
from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware
from weft.planner.measure.kernels import KernelLaunch
from weft.planner.measure.recorder import Ended, Event, RecordedRegion, Started
from weft.planner.simulate.link_replay import LinkMessage
from weft.planner.simulate.region_costs import CostTable
from weft.planner.simulate.region_time import RegionTime, region_time, replay
from weft.planner.simulate.speeds import Speeds

H100 = find_hardware("h100")
IDEAL = Efficiency(
    memory=1.0, launch_s=0.0, link=1.0, network=1.0, latency_s=0.0, network_latency_s=0.0
)
SPEEDS = Speeds(H100.with_efficiency(IDEAL))
NODE = (0, 1)
ACROSS = (0, H100.node)


def kernel(seconds: float) -> KernelLaunch:
    return KernelLaunch("memory", "float32", 0, round(seconds * H100.hbm_tb_s * 1e12))


def op(seconds: float, axis: str = "dp", group: tuple[int, ...] = NODE) -> Operation:
    """A collective that takes these seconds alone on its link."""
    gb_s = H100.link_gb_s if group == NODE else H100.network_gb_s
    sent = round(seconds * gb_s * 1e9)
    return Operation("all_reduce", axis, group, rank=0, payload_bytes=sent, sent_bytes=sent)


def region(*events: Event) -> RecordedRegion:
    return RecordedRegion("B0.0", 0, events=list(events))


def total(*events: Event) -> float:
    return region_time(region(*events), SPEEDS).total


def after(first: Sequence[Event], second: Sequence[Event], *, gap: float = 0.0) -> RegionTime:
    """The time of the second region, which finds what the first one has left."""
    table = CostTable(SPEEDS)
    left = replay(table.region(region(*first))).carried
    return replay(table.region(region(*second)), gap=gap, carried=left)


def test_two_axes_share_a_link_and_each_gets_half_of_it() -> None:
    tp = op(1.0, "tp")
    dp = op(3.0, "dp")
    both = (Started(tp), Started(dp))
    assert total(*both, Ended(tp)) == pytest.approx(2.0)
    assert total(*both, Ended(dp)) == pytest.approx(4.0)
    equal = op(1.0, "dp")
    actual = total(Started(tp), Started(equal), Ended(tp))
    assert actual == pytest.approx(2.0)


def test_an_operation_that_starts_later_shares_only_from_then_on() -> None:
    dp = op(2.0, "dp")
    tp = op(1.0, "tp")
    events = (Started(dp), kernel(1.0), Started(tp), Ended(tp))
    assert total(*events) == pytest.approx(3.0)
    assert total(*events, Ended(dp)) == pytest.approx(3.0)


def test_three_axes_on_one_link_end_in_the_order_of_their_work() -> None:
    ops = [op(1.0, "tp"), op(2.0, "cp"), op(3.0, "dp")]
    ends = [total(*map(Started, ops), Ended(one)) for one in ops]
    assert ends == pytest.approx([3.0, 5.0, 6.0])


def test_the_link_of_a_node_and_its_network_are_not_shared() -> None:
    tp = op(1.0, "tp")
    dp = op(3.0, "dp", ACROSS)
    actual = total(Started(tp), Started(dp), Ended(tp))
    assert actual == pytest.approx(1.0)
    actual = total(Started(tp), Started(dp), Ended(dp))
    assert actual == pytest.approx(3.0)


def test_operations_of_one_axis_queue() -> None:
    first = op(1.0)
    second = op(1.0)
    actual = total(Started(first), Started(second), Ended(first))
    assert actual == pytest.approx(1.0)
    actual = total(Started(first), Started(second), Ended(second))
    assert actual == pytest.approx(2.0)


def test_reductions_of_zero_3_run_beside_its_gathers_on_gpus_alone() -> None:
    """A gather of 1 s that is prefetched behind a reduction of 2 s: at half of the link, it ends
    after 2 s; gloo has one communicator for both, and it ends after 3 s.
    """
    reduction = replace(op(2.0), communicator="reductions")
    gather = op(1.0)
    events = (Started(reduction), Started(gather), Ended(gather))
    assert total(*events) == pytest.approx(2.0)
    assert total(*events, Ended(reduction)) == pytest.approx(3.0)
    on_gloo = Speeds(replace(SPEEDS.hardware, device="cpu"))
    assert region_time(region(*events), on_gloo).total == pytest.approx(3.0)
    hidden = (Started(reduction), kernel(4.0), Started(gather), Ended(gather))
    assert total(*hidden) == pytest.approx(5.0)


def test_a_wait_for_a_carried_gather_is_not_for_the_reduction_before_it() -> None:
    reduction = replace(op(2.0), communicator="reductions")
    gather = op(1.0)
    left = [Started(reduction), Started(gather)]
    assert after(left, [Ended(gather)]).total == pytest.approx(2.0)
    assert after(left, [Ended(reduction)]).total == pytest.approx(3.0)


def test_kernels_hide_an_operation_until_the_rank_waits_for_it() -> None:
    """dp takes 3 s, of which kernels hide 2 and a tp of 0.5 s slows it down by 0.5."""
    dp = op(3.0, "dp")
    tp = op(0.5, "tp")
    events = (Started(dp), kernel(1.0), Started(tp), Ended(tp), kernel(1.0), Ended(dp))
    time = region_time(region(*events), SPEEDS)
    assert time.total == pytest.approx(3.5)
    assert time.exposed == {"tp": pytest.approx(1.0), "dp": pytest.approx(0.5)}
    exposed = sum(time.exposed.values())
    assert time.total == pytest.approx(time.compute + exposed)


def test_what_a_region_leaves_goes_on_in_the_next_one() -> None:
    dp = op(2.0)
    first = [Started(dp), kernel(1.0)]
    second = [kernel(0.25), Ended(dp)]
    time = after(first, second, gap=0.5)
    assert time.total == pytest.approx(0.5)
    assert time.exposed == {"dp": pytest.approx(0.25)}
    other = op(1.0)
    time = after(first, [Started(other), Ended(other)])
    assert time.total == pytest.approx(2.0)
    tp = op(1.0, "tp")
    time = after(first, [Started(tp), Ended(tp)])
    assert time.total == pytest.approx(2.0)
    assert not time.carried[0].left_s
    under_way = after([Started(dp), kernel(1.0)], [kernel(5.0)]).under_way
    assert under_way == 0.0


def test_a_wait_for_what_no_region_started_takes_no_time() -> None:
    assert total(Ended(op(1.0)), kernel(1.0)) == pytest.approx(1.0)
    own = op(1.0)
    actual = total(Started(own), Ended(op(1.0)), kernel(0.5))
    assert actual == pytest.approx(0.5)


def test_a_message_of_the_pipeline_has_the_link_first() -> None:
    tp = op(1.0, "tp")
    events = region(kernel(0.25), Started(tp), Ended(tp))
    costs = CostTable(SPEEDS).region(events)
    delayed = replay(costs, blocked=(LinkMessage("node", 0.0, 0.75),))
    assert delayed.total == pytest.approx(1.75)
    inside = replay(costs, blocked=(LinkMessage("node", 0.5, 0.25),))
    assert inside.total == pytest.approx(1.5)
    blocked = (LinkMessage("network", 0.0, 0.75),)
    assert replay(costs, blocked=blocked).total == pytest.approx(1.25)


def test_an_operation_over_two_regions_is_one_stretch_on_its_lane() -> None:
    dp = op(2.0)
    table = CostTable(SPEEDS)
    first = replay(table.region(region(Started(dp), kernel(1.5))))
    ending = table.region(region(kernel(1.0), Ended(dp)))
    second = replay(ending, carried=first.carried)
    (begun,), (ended,) = first.spans, second.spans
    assert begun.start == 0.0
    assert begun.end == pytest.approx(1.5)
    assert begun.continues is True
    assert ended.start == 0.0
    assert ended.end == pytest.approx(0.5)
    assert ended.is_continued is True


def test_groups_of_one_node_have_the_network_shares_of_their_members() -> None:
    """Eight dp groups with one member each, or four with two: the node's network is divided."""
    size = 10**9
    bytes_s = H100.network_gb_s * 1e9
    one_member = Operation("all_reduce", "dp", (0, 8), 0, size, size)
    two_members = Operation("all_reduce", "dp", (0, 4, 8, 12), 0, size, size)
    assert SPEEDS.operation_s(one_member) == pytest.approx(size / bytes_s)
    assert SPEEDS.operation_s(two_members) == pytest.approx(size / bytes_s / 2)


def test_cpu_ranks_add_up_within_nodes_and_then_between_them() -> None:
    """Of a sum over two nodes of four, each member sends its part of a quarter to the other node: with
    `size` added up, 2 (4 - 1) / 4 within the node and 2 (2 - 1) / 2 of a quarter between nodes.
    """
    size = 10**9
    sent = 2 * 7 * size // 8
    group = (0, 1, 2, 3, 8, 9, 10, 11)
    on_cpus = Speeds(replace(SPEEDS.hardware, device="cpu"))
    within_s = 2 * 3 / 4 * size / (H100.link_gb_s * 1e9)
    between_s = 2 * 1 / 2 * size / 4 / (H100.network_gb_s * 1e9)
    summed = Operation("all_reduce", "dp", group, 0, size, sent)
    assert on_cpus.operation_s(summed) == pytest.approx(within_s + between_s)
    assert SPEEDS.operation_s(summed) == pytest.approx(sent / 4 / (H100.network_gb_s * 1e9))
    uneven = Operation("all_reduce", "dp", (0, 1, 8), 0, size, sent)
    assert on_cpus.operation_s(uneven) == SPEEDS.operation_s(uneven)


def test_an_all_to_all_leaves_a_node_through_the_network_of_its_own_device() -> None:
    """Of 15 parts 8 are for the other node; a ring of the same group has the network of 8 devices."""
    size = 15 * 10**8
    group = tuple(range(16))
    all_to_all = Operation("all_to_all", "ep", group, 0, size, size)
    ring = Operation("all_gather", "ep", group, 0, size, size)
    assert SPEEDS.operation_s(all_to_all) == pytest.approx(0.8 / H100.network_gb_s)
    assert SPEEDS.operation_s(ring) == pytest.approx(1.5 / H100.network_gb_s / 8)
    inside = Operation("all_to_all", "ep", NODE, 0, size, size)
    assert SPEEDS.operation_s(inside) == pytest.approx(1.5 / H100.link_gb_s)


def test_with_a_shared_link_a_faster_kernel_can_make_a_region_longer() -> None:
    """The kernel that is left out had delayed an operation that nothing waits for."""
    tp = op(1.0, "tp")
    dp = op(1.0, "dp")
    rest = (Started(dp), kernel(0.5), Ended(tp), kernel(5.0))
    assert total(Started(tp), kernel(1.0), *rest) == pytest.approx(6.5)
    assert total(Started(tp), *rest) == pytest.approx(7.0)
    across = op(1.0, "dp", ACROSS)
    two_links = (Started(across), kernel(0.5), Ended(tp), kernel(5.0))
    assert total(Started(tp), kernel(1.0), *two_links) == pytest.approx(6.5)
    assert total(Started(tp), *two_links) == pytest.approx(6.0)


@st.composite
def regions_without_sharing(draw: st.DrawFn) -> list[Event]:
    """Kernels, operations of tp in the node and of dp between nodes, each waited for or not."""
    events: list[Event] = []
    under_way: list[Operation] = []
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(["kernel", "tp", "dp", "wait"]))
        seconds = draw(st.integers(1, 8)) / 8
        if kind == "kernel":
            events.append(kernel(seconds))
        elif kind == "wait" and under_way:
            events.append(Ended(under_way.pop(0)))
        elif kind in ("tp", "dp"):
            started = op(seconds, kind, NODE if kind == "tp" else ACROSS)
            under_way.append(started)
            events.append(Started(started))
    return events


@settings(max_examples=60)
@given(
    regions_without_sharing(),
    st.sampled_from(["hbm_tb_s", "link_gb_s", "network_gb_s"]),
    st.sampled_from([1.5, 4.0]),
)
def test_without_sharing_no_faster_kernel_or_link_makes_a_region_longer(
    events: list[Event], figure: str, factor: float
) -> None:
    faster = replace(SPEEDS.hardware, **{figure: getattr(H100, figure) * factor})  # type: ignore[arg-type]
    before = region_time(region(*events), SPEEDS)
    now = region_time(region(*events), Speeds(faster))
    assert now.total <= before.total * (1 + 1e-9)
    assert before.total >= before.compute
    waits = sum(before.exposed.values())
    assert before.total == pytest.approx(before.compute + waits)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["tp", "cp", "dp"]), st.integers(1, 8)), max_size=8))
def test_a_link_does_all_its_work_whatever_the_lanes(work: list[tuple[str, int]]) -> None:
    """Operations that start together end, the last of them, after the sum of their seconds."""
    ops = [op(seconds / 8, axis) for axis, seconds in work]
    time = region_time(region(*map(Started, ops)), SPEEDS)
    total_seconds = sum(seconds for _, seconds in work) / 8
    assert time.under_way == pytest.approx(total_seconds)
