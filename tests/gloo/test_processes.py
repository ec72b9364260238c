"""Collectives between processes: overlap, Work handles, order within and between groups, rendezvous, close."""

import gc
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.errors import CommError
from weft.testing import run_ranks

LATE_S = 0.4


@dataclass
class Observed:
    """What one rank saw of its two works."""

    started_s: float
    completed_early: list[bool]
    completed_late: list[bool]
    sums: list[float]


def completed(works) -> list[bool]:
    return [work.is_completed() for work in works]


@pytest.mark.parametrize("checked", [True, False])
def test_start_returns_before_the_other_ranks_arrive_and_is_completed_turns_true(checked):
    def run_rank(comm):
        x = torch.ones(100_000)
        out = torch.zeros(100_000)
        if comm.rank == 0:
            comm.recv(out, "dp", source=1)
        else:
            comm.send(x, "dp", to=0)
        comm.barrier("dp")
        comm.checked = checked
        start = time.monotonic()
        if comm.rank == 0:
            works = [comm.start_all_reduce(x, "dp"), comm.start_recv(out, "dp", source=1)]
        else:
            time.sleep(LATE_S)
            works = [comm.start_all_reduce(x, "dp"), comm.start_send(x, "dp", to=0)]
        started_s = time.monotonic() - start
        completed_early = completed(works)
        deadline = time.monotonic() + 10
        while not all(completed(works)) and time.monotonic() < deadline:
            time.sleep(0.01)
        completed_late = completed(works)
        sums = [work.wait().sum().item() for work in works]
        return Observed(started_s, completed_early, completed_late, sums)

    first, second = run_ranks("dp2", run_rank, transport="processes")
    assert first.started_s < LATE_S / 2
    assert first.completed_early == [False, False]
    assert first.completed_late == second.completed_late == [True, True]
    assert first.sums == [200_000, 100_000]


def test_signature_checks_do_not_make_a_correct_program_deadlock():
    """Rank 0 starts an all_reduce and then sends; rank 1 receives and then calls the all_reduce."""

    def run_rank(comm):
        x = torch.full((3,), float(comm.rank))
        if comm.rank == 0:
            work = comm.start_all_reduce(x, "dp")
            comm.send(x, "dp", to=1)
            return work.wait().tolist()
        comm.recv(torch.empty(3), "dp", source=0)
        return comm.all_reduce(x, "dp").tolist()

    assert run_ranks("dp2", run_rank, transport="processes") == [[1, 1, 1]] * 2


def test_a_message_whose_handle_was_dropped_still_arrives():
    def run_rank(comm):
        x = torch.zeros(1000)
        if comm.rank == 0:
            comm.send(x, "pp", to=1)
        else:
            comm.recv(x, "pp", source=0)
        comm.checked = False
        for turn in range(3):
            if comm.rank == 0:
                comm.start_send(torch.full((1000,), float(turn)), "pp", to=1)
                gc.collect()
        received = []
        if comm.rank == 1:
            time.sleep(0.1)
            received = []
            for _ in range(3):
                message = comm.recv(torch.empty(1000), "pp", source=0)
                received.append(message[0].item())
        comm.barrier("pp")
        return received

    assert run_ranks("pp2", run_rank, transport="processes")[1] == [0, 1, 2]


def test_an_unchecked_call_does_not_overtake_a_waiting_checked_one():
    def run_rank(comm):
        comm.barrier("dp")
        first = torch.ones(2)
        if comm.rank == 1:
            time.sleep(LATE_S)
            comm.all_reduce(first, "dp")
            comm.checked = False
            time.sleep(LATE_S)
            return comm.all_reduce(10 * first, "dp")[0].item()
        waiting = comm.start_all_reduce(first, "dp")
        comm.checked = False
        second = comm.start_all_reduce(10 * first, "dp")
        return waiting.wait()[0].item(), second.wait()[0].item()

    assert run_ranks("dp2", run_rank, transport="processes") == [(2, 20), 20]


def test_checked_and_unchecked_calls_keep_their_order():
    def run_rank(comm):
        x = torch.tensor([float(comm.rank)])
        works = []
        for turn in range(10):
            comm.checked = turn % 3 == 0
            works.append(comm.start_all_reduce(x + turn, "dp"))
        return [work.wait().item() for work in reversed(works)]

    assert (
        run_ranks("dp3", run_rank, transport="processes")
        == [[3.0 + 3 * turn for turn in reversed(range(10))]] * 3
    )


def test_reductions_are_the_same_bits_every_time():
    def run_rank(comm):
        generator = torch.Generator().manual_seed(comm.rank)
        x = torch.randn(150_000, generator=generator)
        sums = set()
        for size in (30, 150_000):
            for _ in range(5):
                total = comm.all_reduce(x[:size], "dp").sum().item()
                shard = comm.reduce_scatter(x[:size], "dp").sum().item()
                sums.add((total, shard))
        return len(sums)

    assert run_ranks("dp3", run_rank, transport="processes") == [2, 2, 2]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_rendezvous_by_environment_by_address_and_by_store(tmp_path):
    env_port = free_port()
    tcp_port = free_port()

    def run_rank(comm):
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(env_port),
            RANK=str(comm.rank),
            LOCAL_RANK=str(comm.rank),
            WORLD_SIZE="2",
        )
        store = dist.FileStore(str(tmp_path / "store"), 2)
        totals = []
        for rendezvous in ("env://", f"tcp://127.0.0.1:{tcp_port}", store):
            transport = ProcessTransport(comm.rank, 2, rendezvous, timeout_s=20)
            other = Comm(comm.mesh, comm.rank, transport)
            totals.append(other.all_reduce(torch.ones(1), "dp").item())
            comm.barrier("dp")
            transport.close()
        return totals

    assert run_ranks("dp2", run_rank, transport="processes") == [[2, 2, 2]] * 2


def test_an_adopted_process_group_of_torch_stays_usable(tmp_path):
    def run_rank(comm):
        store = dist.FileStore(str(tmp_path / "store"), 2)
        timeout = timedelta(seconds=20)
        dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=2, timeout=timeout)
        totals = []
        for _ in range(2):
            transport = ProcessTransport.adopt(timeout_s=20)
            adopted = Comm(comm.mesh, comm.rank, transport)
            totals.append(adopted.all_reduce(torch.ones(1), "dp").item())
            transport.close()
        x = torch.ones(1)
        dist.all_reduce(x)
        dist.destroy_process_group()
        return [*totals, x.item()]

    assert run_ranks("dp2", run_rank, transport="processes") == [[2, 2, 2]] * 2


def test_close_aborts_collectives_in_flight(tmp_path):
    def run_rank(comm):
        transport = ProcessTransport(comm.rank, 2, f"file://{tmp_path}/store", timeout_s=30)
        other = Comm(comm.mesh, comm.rank, transport)
        other.barrier("dp")
        took_s = 0.0
        if comm.rank == 0:
            other.checked = False
            work = other.start_all_reduce(torch.ones(200_000), "dp")
            start = time.monotonic()
            transport.close()
            with pytest.raises(CommError):
                work.wait()
            del work, other, transport
            gc.collect()
            took_s = time.monotonic() - start
        comm.barrier("dp")
        return took_s

    assert run_ranks("dp2", run_rank, transport="processes")[0] < 5
