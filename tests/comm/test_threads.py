"""Ranks as threads: what goes wrong is an error that names ranks, for all who wait, at once."""

import threading
import time

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.observe import LateRanks
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.errors import CommError, CommTimeout, MismatchError
from weft.testing import run_ranks

MISMATCHES = {
    "operation": (
        lambda comm, x: comm.all_gather(x, "dp") if comm.rank == 1 else comm.all_reduce(x, "dp"),
        "ranks 0 2: all_reduce(sum) float32[4]; rank 1: all_gather(dim 0) float32[4*]",
    ),
    "reduction": (
        lambda comm, x: comm.all_reduce(x, "dp", op="max" if comm.rank == 2 else "sum"),
        "ranks 0 1: all_reduce(sum) float32[4]; rank 2: all_reduce(max) float32[4]",
    ),
    "shape": (
        lambda comm, x: comm.all_reduce(x[comm.rank == 0 :], "dp"),
        "rank 0: all_reduce(sum) float32[3]; ranks 1 2: all_reduce(sum) float32[4]",
    ),
    "dtype": (
        lambda comm, x: comm.all_reduce(x.double() if comm.rank else x, "dp"),
        "rank 0: all_reduce(sum) float32[4]; ranks 1 2: all_reduce(sum) float64[4]",
    ),
    "root": (
        lambda comm, x: comm.broadcast_(x, "dp", root=comm.rank // 2),
        "ranks 0 1: broadcast(root 0) float32[4]; rank 2: broadcast(root 1) float32[4]",
    ),
    "pieces": (
        lambda comm, x: comm.all_gather(x, "dp") if comm.rank else comm.all_gather(x[:2], "dp"),
        "split sizes of the ranks do not match: rank 0: all_gather(dim 0) float32[2*] input_split_sizes (2, 2, 2)",
    ),
    "rows": (
        lambda comm, x: comm.all_to_all(x[:3], "dp", recv_sizes=[1, 1, 1 + (comm.rank == 2)]),
        "rank 2: all_to_all float32[3*] input_split_sizes (1, 1, 1) output_split_sizes (1, 1, 2)",
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatch_names_the_ranks_and_what_each_brought(what):
    play, told = MISMATCHES[what]
    with pytest.raises(MismatchError) as caught:
        run_ranks("dp3", lambda comm: play(comm, torch.ones(4)))
    assert told in str(caught.value)


def test_every_rank_sees_the_mismatch():
    def see(comm):
        with pytest.raises(MismatchError):
            comm.all_reduce(torch.ones(1 + comm.rank), "dp")
        return comm.all_reduce(torch.ones(1), "dp").item()

    assert run_ranks("dp3", see) == [3, 3, 3]


def test_a_message_of_another_shape_is_a_mismatch_on_both_ends():
    def pass_on(comm):
        with pytest.raises(MismatchError, match=r"rank 0: send float32\[2\]; rank 1: recv float32\[3\]"):
            comm.send(torch.ones(2), "pp", to=1) if comm.rank == 0 else comm.recv(torch.ones(3), "pp", source=0)

    run_ranks("pp2", pass_on)


def test_a_time_out_names_who_is_missing_and_who_is_there():
    world = ThreadWorld(3, timeout_s=0.2)
    mesh = Mesh.parse("tp3")
    errors = {}

    def wait(rank):
        try:
            Comm(mesh, rank, world.transport(rank)).all_reduce(torch.ones(2), "tp")
        except CommTimeout as error:
            errors[rank] = error

    threads = [threading.Thread(target=wait, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in (0, 2):
        assert "all_reduce(sum) float32[2] over tp, ranks 0 1 2: rank 1 did not come within 0.2 s" in str(errors[rank])
        assert f"reported by rank {rank} (tp{rank}) of mesh tp3; ranks: 0 = tp0, 1 = tp1" in errors[rank].__notes__[0]


def test_a_late_rank_is_reported_once_and_the_collective_completes_when_it_joins():
    world, mesh = ThreadWorld(4, late_after_s=0.1), Mesh.parse("dp2 tp2")
    reports: list[LateRanks] = []
    results = {}

    def play(rank):
        comm = Comm(mesh, rank, world.transport(rank), on_late=reports.append)
        if rank == 3:
            time.sleep(0.5)
        results[rank] = comm.all_reduce(torch.ones(2), ("dp", "tp"))[0].item()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(4), 4.0)
    assert len(reports) == 1
    reporter = reports[0].rank
    assert str(reports[0]) == (
        f"rank {reporter} ({mesh.coord_text(reporter)}) has waited 0.1 s in "
        "all_reduce(sum) float32[2] over dp+tp, ranks 0 1 2 3: rank 3 (dp1 tp1) has not arrived; still waiting"
    )


def test_the_first_failing_rank_releases_all_who_wait_at_once(monkeypatch):
    monkeypatch.setattr("weft.comm.rendezvous.WAIT_SLICE_S", 30.0)  # nobody looks up by himself meanwhile
    released = []

    def fail(comm):
        if comm.rank == 3:
            time.sleep(0.05)
            raise ValueError("no data")
        try:
            comm.barrier("dp")
        except CommError as error:
            released.append((comm.rank, str(error)))
            raise

    start = time.monotonic()
    with pytest.raises(ValueError, match="no data") as caught:
        run_ranks("dp4 tp2", fail)
    assert time.monotonic() - start < 10
    assert caught.value.__notes__ == ["raised by rank 3 (dp1 tp1) of mesh dp4 tp2"]
    assert {rank for rank, _ in released} == {1, 5, 7}  # ranks of even tp are a group without rank 3: they were done
    assert all("rank 3 failed first: ValueError: no data" in told for _, told in released)


def test_who_waits_for_a_rank_that_has_finished_is_told():
    with pytest.raises(CommTimeout, match="rank 1 finished without coming"):
        run_ranks("dp3", lambda comm: comm.rank == 1 or comm.barrier("dp"))


def test_a_deadlock_is_told_within_seconds_with_who_waits_for_whom():
    def circle(comm):
        comm.recv(torch.ones(1), "pp", source=(comm.rank + 1) % 3)
        comm.send(torch.ones(1), "pp", to=(comm.rank - 1) % 3)

    start = time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        run_ranks("pp3", circle)
    assert time.monotonic() - start < 10
    assert "deadlock, every rank waits: rank 0 at recv float32[1] over pp, ranks 1 -> 0, for rank 1" in str(
        caught.value
    )


def test_a_slow_rank_is_no_deadlock():
    def slow(comm):
        if comm.rank == 0:
            time.sleep(2.5)
        comm.barrier("dp")
        return True

    assert run_ranks("dp3", slow) == [True] * 3


def test_a_send_is_done_when_it_was_received_and_not_before():
    def pass_on(comm):
        if comm.rank == 0:
            work = comm.start_send(torch.ones(2), "dp", to=1)
            before = work.is_completed()
            comm.barrier("dp")
            comm.barrier("dp")
            return before, work.is_completed()
        comm.barrier("dp")
        comm.recv(torch.ones(2), "dp", source=0)
        comm.barrier("dp")
        return None

    assert run_ranks("dp2", pass_on)[0] == (False, True)


def test_sums_go_in_rank_order_whoever_comes_first():
    """1 + 1e16 - 1e16 + 3 is 3 in this order and 0 to 4 in others: the sum does not depend on who is late."""
    values = [1.0, 1e16, -1e16, 3.0]

    def late(comm, last):
        if comm.rank == last:
            time.sleep(0.02)
        x = torch.tensor([values[comm.rank]], dtype=torch.float64)
        return comm.all_reduce(x, "dp").item(), comm.reduce_scatter(x.repeat(4), "dp").item()

    for last in range(4):
        assert set(run_ranks("dp4", lambda comm, last=last: late(comm, last))) == {(3.0, 3.0)}


def test_sums_of_16_bit_floats_are_rounded_once():
    """256 + 1 is 256 in bfloat16: eight ones more are lost one by one and kept in float32."""

    def total(comm):
        x = torch.full((9,), 1.0 if comm.rank else 256.0, dtype=torch.bfloat16)
        return comm.all_reduce(x, "dp")[0].item(), comm.reduce_scatter(x, "dp").item()

    assert set(run_ranks("dp9", total)) == {(264.0, 264.0)}


def test_ranks_may_live_on_different_devices():
    """The device without memory stands in for a second real one: what comes to it is there, with its shape."""
    world, mesh, got = ThreadWorld(2, devices=("cpu", "meta")), Mesh.parse("dp2"), {}

    def play(rank):
        comm = Comm(mesh, rank, world.transport(rank))
        got[rank] = comm.broadcast_(torch.ones(3, device=comm.device), "dp")

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[rank].device.type for rank in range(2)] == ["cpu", "meta"]


@pytest.mark.gpu
def test_pieces_move_to_the_device_that_takes_them():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    world, mesh, got = ThreadWorld(2, devices=("cuda:0", "cuda:1")), Mesh.parse("dp2"), {}

    def play(rank):
        comm = Comm(mesh, rank, world.transport(rank))
        got[rank] = comm.all_gather(torch.full((2,), float(rank), device=comm.device), "dp")

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(2):
        assert got[rank].device == torch.device("cuda", rank)
        assert got[rank].tolist() == [0, 0, 1, 1]


def test_32_ranks_meet_often_and_quickly():
    """A smoke alarm, not a benchmark: 200 rounds of 32 ranks take about 0.3 s on two cores."""

    def meet(comm):
        x = torch.ones(1)
        for _ in range(200):
            comm.all_reduce(x, "dp")

    start = time.monotonic()
    run_ranks("dp32", meet)
    assert time.monotonic() - start < 20
