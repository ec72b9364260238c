"""The conformance suite over every transport between threads that is found, and the shapes and dtypes of the meta transport."""

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.meta import MetaTransport
from weft.core.mesh import Mesh
from weft.core.transports import thread_transports
from weft.errors import LaunchError
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
