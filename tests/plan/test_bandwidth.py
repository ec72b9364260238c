"""Bus bandwidths: the formulas of nccl-tests, and what a rank of a ring really sends."""

from __future__ import annotations

import pytest

from weft.comm.comm import Comm
from weft.comm.observe import Operation
from weft.testing import run_ranks
from weft_plan.bench.bandwidth import OPERATIONS, RINGS, GroupTimes, bus_factor, byte_sizes
from weft_plan.bench.operations import known_operation


def group_times(
    operation: str, *, members: int, size: int, seconds: float, nodes: int = 1
) -> GroupTimes:
    return GroupTimes(
        axis="dp",
        ranks=tuple(range(members)),
        num_nodes=nodes,
        operation=operation,  # type: ignore[arg-type]
        size_bytes=size,
        iterations=3,
        min_s=seconds,
        median_s=seconds,
    )


NCCL_TESTS = {
    # src/*.cu of nccl-tests: (baseBw in counts a rank, factor), with n ranks
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1,
    "send_recv": lambda n: 1,
}


@pytest.mark.parametrize("members", [2, 3, 8, 72])
def test_bus_bandwidth_is_that_of_nccl_tests(members: int) -> None:
    assert NCCL_TESTS.keys() == set(OPERATIONS)
    for operation, factor in NCCL_TESTS.items():
        row = group_times(operation, members=members, size=10**9, seconds=0.5)
        assert row.algorithm_gb_s == pytest.approx(2.0)
        assert row.bus_gb_s == pytest.approx(2.0 * factor(members))


def test_bus_bandwidth_is_the_rate_at_which_a_rank_of_a_ring_sends() -> None:
    """Against the bytes that weft counts: a second in which a rank sends them all."""

    def sent(comm: Comm) -> dict[str, tuple[int, int]]:
        records: list[Operation] = []

        class Recorder:
            def started(self, op: Operation) -> None:
                records.append(op)

            def finished(self, op: Operation) -> None: ...

        observed = Comm(comm.mesh, comm.rank, comm.transport, observers=(Recorder(),))
        found = {}
        for name in (*RINGS, "send_recv"):
            records.clear()
            operation = known_operation(name, observed, "dp", 4 * 60)  # type: ignore[arg-type]
            operation.run()
            found[name] = (operation.size_bytes, sum(record.sent_bytes for record in records))
        return found

    for members in (2, 3, 4):
        for sizes in run_ranks(f"dp{members}", sent):
            for name, (size, sent_bytes) in sizes.items():
                assert size * bus_factor(name, members) == sent_bytes  # type: ignore[arg-type]


def test_ranks_of_a_node_share_its_network_in_a_ring() -> None:
    """8 ranks on 2 nodes: one flow of the ring leaves each node, of whose network 4 ranks have a part each."""
    ring = group_times("all_gather", members=8, size=8 * 10**9, seconds=1.0, nodes=2)
    assert ring.placement == "between"
    assert ring.device_gb_s("cuda") == pytest.approx(ring.bus_gb_s / 4)
    apart = group_times("all_gather", members=2, size=10**9, seconds=1.0, nodes=2)
    assert apart.device_gb_s("cuda") == apart.bus_gb_s
    inside = group_times("all_gather", members=8, size=10**9, seconds=1.0)
    assert inside.device_gb_s("cuda") == inside.bus_gb_s


def test_what_goes_within_nodes_first_leaves_them_once() -> None:
    """8 CPU ranks on 2 nodes: of the 7 shares that a member gets, 1 comes from the other node."""
    for name in ("all_reduce", "all_gather", "reduce_scatter"):
        row = group_times(name, members=8, size=8 * 10**9, seconds=1.0, nodes=2)
        assert row.device_gb_s("cpu") == pytest.approx(row.bus_gb_s / 7)
    flat = group_times("all_to_all", members=8, size=8 * 10**9, seconds=1.0, nodes=2)
    assert flat.device_gb_s("cpu") == pytest.approx(flat.bus_gb_s / 4)
    uneven = group_times("all_gather", members=5, size=10**9, seconds=1.0, nodes=2)
    assert uneven.device_gb_s("cpu") == pytest.approx(uneven.bus_gb_s / 2.5)


def test_sizes_are_a_geometric_series() -> None:
    assert list(byte_sizes(1024, 20_000, factor=4)) == [1024, 4096, 16384]
    assert list(byte_sizes(8, 8, factor=2)) == [8]


@pytest.mark.parametrize("mesh", ["dp2", "dp3 tp2"])
def test_every_result_is_checked_element_by_element(mesh: str) -> None:
    def checked(comm: Comm) -> dict[str, int]:
        found = {}
        for axis in comm.mesh.wide_axes:
            for name in OPERATIONS:
                operation = known_operation(name, comm, axis, 4 * 60)
                result = operation.run()
                found[f"{axis} {name}"] = operation.check(result, comm, axis)
        return found

    results = run_ranks(mesh, checked)
    for name in results[0]:
        _, operation = name.split()
        counts = [result[name] for result in results]
        if operation == "gather":
            assert 60 in counts
            assert 0 in counts
        else:
            assert min(counts) > 0, name


@pytest.mark.parametrize("name", OPERATIONS)
def test_one_wrong_element_is_an_error(name: str) -> None:
    def check_with_a_wrong_element(comm: Comm) -> str:
        operation = known_operation(name, comm, "dp", 4 * 60)  # type: ignore[arg-type]
        if operation.expected is not None:
            operation.expected[-1] += 1
        try:
            operation.check(operation.run(), comm, "dp")
        except Exception as error:  # noqa: BLE001 - the other rank's check must end, too
            return str(error)
        return ""

    messages = run_ranks("dp2", check_with_a_wrong_element)
    assert "1 of" in messages[0]
    assert "elements are wrong on rank 0" in messages[0]
