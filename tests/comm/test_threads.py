"""Ranks as threads: failures raise on all waiting ranks at once and name ranks; sums are computed in rank order."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.observe import LateRanks
from weft.comm.threads import ThreadWorld
from weft.core.mesh import Mesh
from weft.errors import CommError, CommTimeout, MismatchError
from weft.testing import run_ranks

PROMPTLY_S = 10
"""Far below the time-out of a run: for errors that must not wait for it."""


def run_in_threads(function, ranks):
    """Run `function(rank)` in one thread per rank until all end."""
    threads = [threading.Thread(target=function, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@dataclass(frozen=True)
class Mismatch:
    """A call with x = ones(4) that differs between the ranks of dp3, and a part of its error
    message.
    """

    call: Callable
    message: str


def all_gather_on_rank_1(comm, x):
    if comm.rank == 1:
        return comm.all_gather(x, "dp")
    return comm.all_reduce(x, "dp")


def other_shape_on_rank_0(comm, x):
    own = x[1:] if comm.rank == 0 else x
    return comm.all_reduce(own, "dp")


def other_dtype_on_rank_0(comm, x):
    own = x if comm.rank == 0 else x.double()
    return comm.all_reduce(own, "dp")


def other_length_on_rank_0(comm, x):
    own = x[:2] if comm.rank == 0 else x
    return comm.all_gather(own, "dp")


def other_recv_sizes_on_rank_2(comm, x):
    last = 2 if comm.rank == 2 else 1
    return comm.all_to_all(x[:3], "dp", recv_sizes=[1, 1, last])


MISMATCHES = {
    "operation": Mismatch(
        all_gather_on_rank_1,
        "ranks 0 2: all_reduce(sum) float32[4]; rank 1: all_gather(dim 0) float32[4*]",
    ),
    "reduction": Mismatch(
        lambda comm, x: comm.all_reduce(x, "dp", op="max" if comm.rank == 2 else "sum"),
        "ranks 0 1: all_reduce(sum) float32[4]; rank 2: all_reduce(max) float32[4]",
    ),
    "shape": Mismatch(
        other_shape_on_rank_0,
        "rank 0: all_reduce(sum) float32[3]; ranks 1 2: all_reduce(sum) float32[4]",
    ),
    "dtype": Mismatch(
        other_dtype_on_rank_0,
        "rank 0: all_reduce(sum) float32[4]; ranks 1 2: all_reduce(sum) float64[4]",
    ),
    "root": Mismatch(
        lambda comm, x: comm.broadcast_(x, "dp", root=comm.rank // 2),
        "ranks 0 1: broadcast(root 0) float32[4]; rank 2: broadcast(root 1) float32[4]",
    ),
    "length of a piece": Mismatch(
        other_length_on_rank_0,
        "split sizes of the ranks do not match: rank 0: all_gather(dim 0) float32[2*] input_split_sizes (2, 2, 2)",
    ),
    "split sizes": Mismatch(
        other_recv_sizes_on_rank_2,
        "rank 2: all_to_all float32[3*] input_split_sizes (1, 1, 1) output_split_sizes (1, 1, 2)",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_names_the_ranks_and_their_signatures(name):
    mismatch = MISMATCHES[name]
    with pytest.raises(MismatchError) as caught:
        run_ranks("dp3", lambda comm: mismatch.call(comm, torch.ones(4)))
    assert mismatch.message in str(caught.value)


def test_every_rank_raises_the_mismatch_and_can_go_on():
    def mismatch_then_all_reduce(comm):
        with pytest.raises(MismatchError):
            comm.all_reduce(torch.ones(1 + comm.rank), "dp")
        return comm.all_reduce(torch.ones(1), "dp").item()

    assert run_ranks("dp3", mismatch_then_all_reduce) == [3, 3, 3]


def test_a_message_of_another_shape_is_a_mismatch_on_both_ends():
    def start_message(comm):
        if comm.rank == 0:
            return comm.start_send(torch.ones(2), "pp", to=1)
        return comm.start_recv(torch.ones(3), "pp", source=0)

    def exchange(comm):
        work = start_message(comm)
        with pytest.raises(
            MismatchError, match=r"rank 0: send float32\[2\]; rank 1: recv float32\[3\]"
        ):
            work.wait()

    run_ranks("pp2", exchange)


def test_a_time_out_names_missing_and_present_ranks_with_coordinates():
    world = ThreadWorld(3, timeout_s=0.2)
    mesh = Mesh.parse("tp3")
    errors = {}

    def wait(rank):
        comm = Comm(mesh, rank, world.transport(rank))
        try:
            comm.all_reduce(torch.ones(2), "tp")
        except CommTimeout as error:
            errors[rank] = error

    run_in_threads(wait, ranks=(0, 2))
    for rank in (0, 2):
        message = "all_reduce(sum) float32[2] over tp, ranks 0 1 2: rank 1 did not arrive within 0.2 s; present: ranks 0 2"
        assert str(errors[rank]) == message
        note = f"reported by rank {rank} (tp{rank}) of mesh tp3; ranks: 0 = tp0, 1 = tp1, 2 = tp2"
        assert errors[rank].__notes__ == [note]


def test_a_late_rank_is_reported_once_and_the_collective_completes_when_it_joins():
    world = ThreadWorld(4, late_after_s=0.1)
    mesh = Mesh.parse("dp2 tp2")
    reports: list[LateRanks] = []
    results = {}

    def all_reduce(rank):
        comm = Comm(mesh, rank, world.transport(rank), on_late=reports.append)
        if rank == 3:
            time.sleep(0.5)
        total = comm.all_reduce(torch.ones(2), ("dp", "tp"))
        results[rank] = total[0].item()

    run_in_threads(all_reduce, ranks=range(4))
    assert results == dict.fromkeys(range(4), 4.0)
    assert len(reports) == 1
    reporter = reports[0].rank
    assert str(reports[0]) == (
        f"rank {reporter} ({mesh.coord_text(reporter)}) has waited 0.1 s in "
        "all_reduce(sum) float32[2] over dp+tp, ranks 0 1 2 3: rank 3 (dp1 tp1) has not arrived; still waiting"
    )


def test_the_first_failing_rank_releases_all_waiting_ranks_at_once(monkeypatch):
    monkeypatch.setattr("weft.comm.threads.WAIT_SLICE_S", 30.0)  # no rank wakes by itself meanwhile
    released = {}

    def fail_on_rank_3(comm):
        if comm.rank == 3:
            time.sleep(0.05)
            raise ValueError("no data")
        try:
            comm.barrier("dp")
        except CommError as error:
            released[comm.rank] = str(error)
            raise

    start_s = time.monotonic()
    with pytest.raises(ValueError, match="no data") as caught:
        run_ranks("dp4 tp2", fail_on_rank_3)
    assert time.monotonic() - start_s < PROMPTLY_S
    assert caught.value.__notes__ == ["raised by rank 3 (dp1 tp1) of mesh dp4 tp2"]
    assert set(released) == {
        1,
        5,
        7,
    }  # ranks of even tp are a group without rank 3: their barrier completes
    for message in released.values():
        assert "rank 3 failed first: ValueError: no data" in message


def test_a_rank_that_waits_for_a_finished_one_raises():
    def leave_on_rank_1(comm):
        if comm.rank != 1:
            comm.barrier("dp")

    with pytest.raises(CommTimeout, match="rank 1 finished without joining"):
        run_ranks("dp3", leave_on_rank_1)


def test_a_deadlock_is_an_error_within_seconds_and_says_who_waits_for_whom():
    def receive_in_a_circle(comm):
        comm.recv(torch.ones(1), "pp", source=(comm.rank + 1) % 3)
        comm.send(torch.ones(1), "pp", to=(comm.rank - 1) % 3)

    start_s = time.monotonic()
    with pytest.raises(CommTimeout) as caught:
        run_ranks("pp3", receive_in_a_circle)
    assert time.monotonic() - start_s < PROMPTLY_S
    first_wait = "rank 0 at recv float32[1] over pp, ranks 1 -> 0, for rank 1"
    assert f"deadlock, every rank waits: {first_wait}" in str(caught.value)


def test_a_slow_rank_is_no_deadlock():
    def slow_on_rank_0(comm):
        if comm.rank == 0:
            time.sleep(2.5)
        comm.barrier("dp")
        return True

    assert run_ranks("dp3", slow_on_rank_0) == [True] * 3


def test_a_send_completes_when_it_is_received_and_not_before():
    def exchange(comm):
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

    assert run_ranks("dp2", exchange)[0] == (False, True)


def test_sums_are_in_rank_order_whichever_rank_comes_last():
    """1 + 1e16 - 1e16 + 3 is 3 in this order and 0 to 4 in others."""
    values = [1.0, 1e16, -1e16, 3.0]

    def sums_with_late_rank(comm, late_rank):
        if comm.rank == late_rank:
            time.sleep(0.02)
        x = torch.tensor([values[comm.rank]], dtype=torch.float64)
        total = comm.all_reduce(x, "dp")
        own_piece = comm.reduce_scatter(x.repeat(4), "dp")
        return total.item(), own_piece.item()

    for late_rank in range(4):
        sums = run_ranks(
            "dp4", lambda comm, late_rank=late_rank: sums_with_late_rank(comm, late_rank)
        )
        assert set(sums) == {(3.0, 3.0)}


def test_sums_of_16_bit_floats_are_rounded_once():
    """256 + 1 is 256 in bfloat16: eight more ones are lost one by one, and kept in float32."""

    def sums(comm):
        value = 256.0 if comm.rank == 0 else 1.0
        x = torch.full((9,), value, dtype=torch.bfloat16)
        total = comm.all_reduce(x, "dp")
        own_piece = comm.reduce_scatter(x, "dp")
        return total[0].item(), own_piece.item()

    assert set(run_ranks("dp9", sums)) == {(264.0, 264.0)}


def test_ranks_may_be_on_different_devices():
    """The meta device stands in for a second real one: its outputs have the right device and shape."""
    world = ThreadWorld(2, devices=("cpu", "meta"))
    mesh = Mesh.parse("dp2")
    results = {}

    def broadcast(rank):
        comm = Comm(mesh, rank, world.transport(rank))
        x = torch.ones(3, device=comm.device)
        results[rank] = comm.broadcast_(x, "dp")

    run_in_threads(broadcast, ranks=range(2))
    assert results[0].device.type == "cpu"
    assert results[1].device.type == "meta"


@pytest.mark.gpu
def test_pieces_move_to_the_device_of_the_output():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    world = ThreadWorld(2, devices=("cuda:0", "cuda:1"))
    mesh = Mesh.parse("dp2")
    results = {}

    def all_gather(rank):
        comm = Comm(mesh, rank, world.transport(rank))
        x = torch.full((2,), float(rank), device=comm.device)
        results[rank] = comm.all_gather(x, "dp")

    run_in_threads(all_gather, ranks=range(2))
    for rank in range(2):
        assert results[rank].device == torch.device("cuda", rank)
        assert results[rank].tolist() == [0, 0, 1, 1]


def test_32_ranks_all_reduce_200_times_quickly():
    """A smoke alarm, not a benchmark: about 0.3 s on two cores."""

    def all_reduce_often(comm):
        x = torch.ones(1)
        for _ in range(200):
            comm.all_reduce(x, "dp")

    start_s = time.monotonic()
    run_ranks("dp32", all_reduce_often)
    assert time.monotonic() - start_s < 20
