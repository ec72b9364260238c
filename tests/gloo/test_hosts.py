"""Groups on several hosts, pretended on one: sums, checks and failures of calls in memory within hosts and over gloo between."""

from __future__ import annotations

import time

import pytest
import torch

from weft.comm import local_peers
from weft.comm.comm import Comm
from weft.comm.local_peers import equal_width
from weft.comm.process_groups import ProcessTransport
from weft.errors import CommError, CommTimeout, MismatchError
from weft.testing import run_ranks
from weft.testing.conformance import conform

HOSTS = "shared memory within hosts, gloo between"
LARGE = 300_000
"""Elements that are no small sum in any dtype, in several rounds, and not divisible by the members."""


def on_hosts(comm: Comm, widths: tuple[int, ...], folder: object, **options: object) -> Comm:
    """A world of these ranks on hosts with so many ranks each."""
    names = [host for host, width in enumerate(widths) for _ in range(width)]
    identity = local_peers.host_identity()
    local_peers.host_identity = lambda: f"{identity} {names[comm.rank]}"
    store = f"file://{folder}/store"
    made = ProcessTransport(comm.rank, comm.mesh.size, store, **{"timeout_s": 20, **options})
    return Comm(comm.mesh, comm.rank, made)


def carriers(comm: Comm) -> frozenset[str]:
    found = comm.transport.carriers
    comm.barrier_world()
    comm.transport.close()
    return found


@pytest.mark.parametrize(
    ("hosts", "width"),
    [
        ("aabb", 2),
        ("aaabbbccc", 3),
        ("aabbb", 0),
        ("abab", 0),
        ("ab", 0),
        ("aaaa", 0),
        ("aabbaa", 0),
    ],
)
def test_the_width_of_hosts_is_that_of_equal_runs(hosts, width):
    assert equal_width(hosts) == width
    assert equal_width([name.replace("b", "") for name in hosts]) == 0


@pytest.mark.parametrize(
    ("mesh", "widths"),
    [
        ("dp4", (2, 2)),
        pytest.param("dp6", (2, 2, 2), marks=pytest.mark.slow),
        pytest.param("dp6", (3, 3), marks=pytest.mark.slow),
        pytest.param("pp2 dp2 tp2", (4, 4), marks=pytest.mark.slow),
    ],
)
def test_hosts_conform(mesh, widths, tmp_path):
    def on_rank(comm):
        hosts = on_hosts(comm, widths, tmp_path)
        checked = conform(hosts)
        with hosts.unchecked():
            return checked, conform(hosts), carriers(hosts)

    for checked, unchecked, found in run_ranks(mesh, on_rank, transport="processes"):
        assert checked == unchecked > 0
        assert HOSTS in found


@pytest.mark.parametrize(
    ("widths", "options"), [((3, 1), {}), ((2, 2), {"deterministic": True}), ((1, 1, 1, 1), {})]
)
def test_uneven_hosts_and_deterministic_runs_have_flat_groups(widths, options, tmp_path):
    def on_rank(comm):
        hosts = on_hosts(comm, widths, tmp_path, **options)
        return hosts.all_reduce(torch.ones(LARGE), "dp")[-1].item(), carriers(hosts)

    assert run_ranks("dp4", on_rank, transport="processes") == [(4, {"gloo"})] * 4


def inputs(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("widths", [(2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_sums_have_the_same_bits_on_every_member_and_in_every_run(widths, tmp_path):
    """Those of float64 are exact to rounding; bfloat16 is added up in float32 and rounded once."""
    size = sum(widths)
    large = LARGE - LARGE % size

    def on_rank(comm):
        hosts = on_hosts(comm, widths, tmp_path)
        found = {}
        for dtype in (torch.float64, torch.bfloat16):
            for numel in (60, large + 1):
                x = inputs(comm.rank, numel, dtype)
                for op in ("sum", "avg", "max"):
                    total = hosts.all_reduce(x, "dp", op=op)
                    assert torch.equal(total, hosts.all_reduce(x, "dp", op=op))
                    parts = hosts.all_gather(hosts.reduce_scatter(x[:large], "dp", op=op), "dp")
                    found[dtype, numel, op] = total, parts
        assert HOSTS in carriers(hosts)
        return found

    results = run_ranks(f"dp{size}", on_rank, transport="processes")
    for (dtype, numel, op), (total, parts) in results[0].items():
        stacked = torch.stack([inputs(rank, numel, dtype) for rank in range(size)]).double()
        expected = {"sum": stacked.sum(0), "avg": stacked.mean(0), "max": stacked.amax(0)}[op]
        tolerance = 1e-14 if dtype == torch.float64 else 2**-8
        for got in (total, parts):
            assert got.dtype == dtype
            error = (got.double() - expected[: len(got)]).abs()
            assert (error <= tolerance * stacked.abs().sum(0)[: len(got)]).all()
        if dtype == torch.bfloat16:
            in_float32 = stacked.float().sum(0)
            if op == "sum":
                assert (total != in_float32.bfloat16()).float().mean() < 0.01, "rounded once"
        for other in results[1:]:
            same = other[dtype, numel, op]
            assert torch.equal(total, same[0])
            assert torch.equal(parts, same[1])


def test_small_sums_have_the_bits_of_rank_threads(tmp_path):
    def sums(comm):
        x = inputs(comm.rank, 1000, torch.float32)
        return comm.all_reduce(x, "dp"), comm.all_reduce(x.bfloat16(), "dp", op="avg")

    def on_rank(comm):
        hosts = on_hosts(comm, (2, 2), tmp_path)
        found = sums(hosts)
        carriers(hosts)
        return found

    in_threads = run_ranks("dp4", sums, transport="threads")
    in_processes = run_ranks("dp4", on_rank, transport="processes")
    for expected, got in zip(in_threads, in_processes, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))


def test_calls_that_differ_are_named_with_the_ranks_of_all_hosts(tmp_path):
    def on_rank(comm):
        hosts = on_hosts(comm, (2, 2), tmp_path)
        with pytest.raises(MismatchError, match=r"rank 3: all_reduce\(sum\) float32\[3\]"):
            hosts.all_reduce(torch.ones(3 if comm.rank == 3 else 2), "dp")
        total = hosts.all_reduce(torch.ones(1), "dp").item()
        carriers(hosts)
        return total

    assert run_ranks("dp4", on_rank, transport="processes") == [4] * 4


def test_a_rank_that_computes_does_its_part_between_hosts(tmp_path):
    """Rank 0 sleeps after its start; the others need its part of every phase."""

    def on_rank(comm):
        hosts = on_hosts(comm, (2, 2), tmp_path)
        hosts.barrier("dp")
        with hosts.unchecked():
            works = [hosts.start_all_reduce(torch.ones(LARGE), "dp") for _ in range(3)]
            if comm.rank == 0:
                time.sleep(3)
            start = time.monotonic()
            totals = [work.wait()[-1].item() for work in works]
        waited_s = time.monotonic() - start
        carriers(hosts)
        return totals, waited_s

    for totals, waited_s in run_ranks("dp4", on_rank, transport="processes"):
        assert totals == [4] * 3
        assert waited_s < 2.5


def test_a_rank_that_does_not_join_is_named_on_all_hosts(tmp_path):
    def on_rank(comm):
        hosts = on_hosts(comm, (2, 2), tmp_path, timeout_s=3)
        hosts.barrier("dp")
        if comm.rank == 3:
            time.sleep(6)
            return True
        with hosts.unchecked(), pytest.raises(CommTimeout, match="rank 3 did not arrive within 3"):
            hosts.all_reduce(torch.ones(LARGE), "dp")
        return True

    assert run_ranks("dp4", on_rank, transport="processes") == [True] * 4


def test_a_rank_that_leaves_fails_the_calls_of_all_hosts(tmp_path):
    def on_rank(comm):
        hosts = on_hosts(comm, (2, 2), tmp_path)
        hosts.barrier("dp")
        start = time.monotonic()
        if comm.rank == 3:
            hosts.transport.close()
            return True
        with hosts.unchecked(), pytest.raises(CommError, match=r"lost ranks? .*3"):
            hosts.all_reduce(torch.ones(LARGE), "dp")
        hosts.transport.close()  # as a program does that ends
        return time.monotonic() - start < 10

    assert run_ranks("dp4", on_rank, transport="processes") == [True] * 4
