"""Ranks of one host in shared memory: sums as between threads, progress without a wait, deaths, and when gloo is chosen."""

from __future__ import annotations

import os
import time

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.local_peers import MAX_MEMBERS, LocalPeers
from weft.comm.process_groups import ProcessTransport
from weft.comm.shared_group import SharedGroup, SharedProgress
from weft.comm.shared_memory import SEGMENT_BYTES, SharedSegment, half_bytes
from weft.comm.transport import Call
from weft.errors import CommError, LaunchError, MismatchError
from weft.testing import run_ranks
from weft.testing.conformance import conform
from weft_plan.bench.record import versions_of

PIECES = 700_001
"""Elements of several pieces of a float32 or float64 tensor, the last of them short."""


def random_on(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def reductions(comm: Comm) -> list[torch.Tensor]:
    """Reductions of small and of large tensors, in three dtypes."""
    results = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for numel in (0, 6, 996, PIECES - PIECES % 6):
            x = random_on(comm.rank, numel, dtype)
            results += [comm.all_reduce(x, "dp", op=op) for op in ("sum", "avg", "max")]
            results.append(comm.reduce_scatter(x, "dp", op="avg"))
    return results


@pytest.mark.parametrize("mesh", ["dp2", "dp3"])
def test_reductions_have_the_bits_of_rank_threads(mesh):
    in_threads = run_ranks(mesh, reductions, transport="threads")
    in_memory = run_ranks(mesh, reductions, transport="processes")
    for expected, got in zip(in_threads, in_memory, strict=True):
        assert len(expected) == len(got)
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))


def movements(comm: Comm) -> list[torch.Tensor]:
    """Large tensors, moved by every operation that computes nothing."""
    x = random_on(comm.rank, PIECES, torch.float32)
    parts = [PIECES - 9, 4, 5]
    sizes = {"send_sizes": parts, "recv_sizes": [parts[comm.rank]] * 3}
    message = torch.zeros(PIECES)
    if comm.rank == 0:
        comm.send(x, "dp", to=1)
    elif comm.rank == 1:
        comm.recv(message, "dp", source=0)
    gathered, swapped = comm.all_gather(x, "dp"), comm.all_to_all(x, "dp", **sizes)
    return [gathered, swapped, comm.broadcast_(x.clone(), "dp", root=2), message]


def test_large_tensors_move_whole_in_every_collective():
    def on_rank(comm):
        return movements(comm), versions_of(comm)

    in_threads = run_ranks("dp3", movements, transport="threads")
    in_memory = run_ranks("dp3", on_rank, transport="processes")
    for expected, (got, versions) in zip(in_threads, in_memory, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(expected, got, strict=True))
        assert versions.endswith(", shared memory")


def test_a_rank_that_does_not_wait_does_its_part_of_calls_of_many_rounds():
    """Rank 0 sleeps after its start; the others need its part of every piece."""

    def on_rank(comm):
        comm.barrier("dp")
        with comm.unchecked():
            x = torch.ones(4 * PIECES)
            work = comm.start_all_reduce(x, "dp")
            if comm.rank == 0:
                time.sleep(3)
            start = time.monotonic()
            total = work.wait()[-1].item()
        return total, time.monotonic() - start

    for total, waited_s in run_ranks("dp3", on_rank, transport="processes"):
        assert total == 3
        assert waited_s < 2.5


def test_ranks_of_which_one_chooses_gloo_use_gloo_and_conform(tmp_path):
    def on_rank(comm):
        if comm.rank == 1:
            os.environ["WEFT_CPU_TRANSPORT"] = "gloo"
        transport = ProcessTransport(comm.rank, 2, f"file://{tmp_path}/store", timeout_s=20)
        other = Comm(comm.mesh, comm.rank, transport)
        found = conform(other, "overlapping", "messages"), transport.carriers
        comm.barrier("dp")
        transport.close()
        return found

    for count, kinds in run_ranks("dp2", on_rank, transport="processes"):
        assert count > 0
        assert kinds == {"gloo"}


def test_unequal_calls_that_are_not_compared_fail_instead_of_mixing_data():
    def on_rank(comm):
        comm.barrier("dp")
        with comm.unchecked(), pytest.raises(CommError, match="different operations"):
            comm.all_reduce(torch.ones(4 + comm.rank), "dp")
        return True

    assert run_ranks("dp2", on_rank, transport="processes") == [True, True]


def test_unequal_sizes_that_are_not_compared_are_named_and_leave_the_group_usable():
    """Rank 0 sends 3 elements to rank 1, which expects 2."""

    def on_rank(comm):
        comm.barrier("dp")
        sends, receives = ((1, 3), (1, 2)) if comm.rank == 0 else ((2, 2), (2, 2))
        message = ""
        with comm.unchecked():
            try:
                comm.all_to_all(torch.ones(4), "dp", send_sizes=sends, recv_sizes=receives)
            except MismatchError as error:
                message = str(error)
            return message, comm.all_reduce(torch.ones(1), "dp").item()

    assert run_ranks("dp2", on_rank, transport="processes") == [
        ("", 2),
        (
            "over dp, split sizes of the ranks do not match: rank 0 sends 3 elements to rank 1,"
            " which expects 2",
            2,
        ),
    ]


def test_a_segment_is_bounded_and_has_no_name():
    before = set(os.listdir("/dev/shm"))
    for num_members in (2, 8, 16, 100, MAX_MEMBERS):
        file = SharedSegment.create(num_members)
        slots_bytes = 2 * num_members * half_bytes(num_members)
        assert slots_bytes <= SEGMENT_BYTES
        assert os.fstat(file).st_size <= SEGMENT_BYTES + 2**16
        os.close(file)
    assert set(os.listdir("/dev/shm")) == before


def test_an_unknown_transport_of_the_environment_is_rejected(monkeypatch):
    monkeypatch.setenv("WEFT_CPU_TRANSPORT", "tcp")
    with pytest.raises(
        LaunchError, match=r"WEFT_CPU_TRANSPORT: unknown \(got tcp; need shared_memory or gloo\)"
    ):
        LocalPeers()


def test_a_call_that_got_on_by_a_piece_is_looked_at_again_soon():
    """The thread of a rank that computes doubles its pauses as long as nothing gets on: 8 MiB took
    119 ms where only the end of a call counted, and 16 since each piece does.
    """
    file = SharedSegment.create(2)
    both = [
        SharedGroup(
            SharedSegment(file, 2), (0, 1), index=index, progress=SharedProgress(LocalPeers())
        )
        for index in (0, 1)
    ]
    os.close(file)
    for group in both:
        group.progress.close()  # without threads: this test looks itself
    sent, received = torch.arange(3 * 2**18), torch.zeros(3 * 2**18, dtype=torch.int64)
    ops = (("send", sent, None), ("recv", None, received))
    calls = [
        Call(op, "dp", (0, 1), index=index, signature="message", input=source, output=out, root=0)
        for index, (op, source, out) in enumerate(ops)
    ]
    started = [group.launch(call) for group, call in zip(both, calls, strict=True)]
    looks = []
    while not started[1].is_completed():
        looks.append(both[0].progress.advance())
    assert looks == [True] * len(looks)
    assert len(looks) > 1
    assert torch.equal(received, sent)
