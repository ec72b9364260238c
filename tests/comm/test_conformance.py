"""The conformance suite over every transport between threads that is found, and the shapes and dtypes of the meta transport."""

import threading

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.transport import MetaTransport
from weft.core.mesh import Mesh
from weft.core.transports import thread_transports
from weft.errors import CommError, CommTimeout, LaunchError, MismatchError
from weft.testing import run_ranks
from weft.testing.conformance import CHECKS, conform

INDEPENDENT_OF_OTHER_RANKS = ("is_completed", "of its own")
"""Words in the names of findings whose values the meta transport gets right too."""


@pytest.mark.parametrize(
    "mesh", ["dp2", "dp3", "tp2 dp3", pytest.param("pp2 dp2 tp2", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("transport", thread_transports())
@pytest.mark.parametrize("check", CHECKS)
def test_every_transport_between_threads_that_is_found_conforms(check, transport, mesh):
    counts = run_ranks(mesh, lambda comm: conform(comm, check), transport=transport)
    assert min(counts) > 0


@pytest.mark.parametrize("transport", thread_transports())
def test_collectives_keep_the_16_bit_type_that_autocast_does_not_have(transport):
    """torch.cat rejects it there."""

    def rank(comm):
        x = torch.full((2, 2), comm.rank + 1.0, dtype=torch.float16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return comm.all_gather(x, "dp", dim=1), comm.all_to_all(x, "dp")

    for index, (gathered, exchanged) in enumerate(run_ranks("dp2", rank, transport=transport)):
        assert gathered.dtype == exchanged.dtype == torch.float16
        assert gathered.tolist() == [[1, 1, 2, 2]] * 2
        assert exchanged.tolist() == [[1, 1], [2, 2]], index


@pytest.mark.parametrize("transport", thread_transports())
def test_a_rank_that_fails_ends_the_calls_of_the_others(transport):
    ended = []

    def rank(comm):
        if comm.rank == 1:
            raise ValueError("this rank is broken")
        try:
            comm.all_reduce(torch.ones(2), "dp" if comm.rank else "tp")
        except CommError:
            ended.append(comm.rank)
            raise

    with pytest.raises(ValueError, match="this rank is broken"):
        run_ranks("dp2 tp2", rank, transport=transport)
    assert sorted(ended) == [0, 2, 3]


@pytest.mark.parametrize("transport", thread_transports())
def test_a_rank_that_does_not_join_is_named(transport):
    """It has returned, or it computes for longer than the time-out."""
    with pytest.raises(CommTimeout, match=r"all_reduce.* rank 1 ") as caught:
        run_ranks(
            "dp2",
            lambda comm: comm.rank == 1 or comm.all_reduce(torch.ones(2), "dp"),
            transport=transport,
        )
    assert "rank 0 (dp0)" in str(caught.value.__notes__)
    is_over = threading.Event()

    def rank(comm):
        if comm.rank == 1:
            return is_over.wait(30)
        try:
            with pytest.raises(CommTimeout, match=r"all_reduce.* rank 1 "):
                comm.all_reduce(torch.ones(2), "dp")
        finally:
            is_over.set()
        return True

    assert run_ranks("dp2", rank, transport=transport, timeout_s=1.0) == [True, True]


@pytest.mark.parametrize("transport", thread_transports())
def test_every_rank_of_calls_that_differ_raises(transport):
    def rank(comm):
        with pytest.raises(MismatchError, match="rank 1: barrier"):
            comm.barrier("dp") if comm.rank == 1 else comm.all_reduce(torch.ones(2), "dp")

    run_ranks("dp2", rank, transport=transport)


def test_threads_are_found_and_another_name_is_rejected_with_those_that_are_there():
    assert "threads" in thread_transports()
    with pytest.raises(
        LaunchError, match=r"transport: unknown .* \(got thread; need .*threads"
    ) as caught:
        run_ranks("dp2", lambda comm: None, transport="thread")
    assert "threads" in caught.value.faults[0].fix


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("check", CHECKS)
def test_shapes_and_dtypes_of_the_meta_transport_conform(check, device):
    mesh = Mesh.parse("dp2 cp2 tp3")
    transport = MetaTransport(mesh.size, 7, device=device)
    comm = Comm(mesh, 7, transport)
    for what, got, expected in CHECKS[check](comm):
        assert got.shape == expected.shape, what
        assert got.dtype == expected.dtype, what
        if any(words in what for words in INDEPENDENT_OF_OTHER_RANKS):
            assert torch.equal(got, expected), what


def test_outputs_of_the_meta_transport_are_zero_unless_in_place():
    comm = Comm(Mesh.parse("dp3"), 1, MetaTransport(3, 1, device="cpu"))
    x = torch.ones(2)
    assert comm.all_reduce(x, "dp").tolist() == [1, 1]
    assert comm.all_gather(x, "dp").tolist() == [0] * 6
    values = comm.recv(torch.ones(2), "dp", source=0).tolist()
    assert values == [0, 0]
