"""The conformance suite over threads; over nobody at all (meta), where shapes and dtypes are what can be right."""

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.meta import MetaTransport
from weft.core.mesh import Mesh
from weft.testing import run_ranks
from weft.testing.conformance import CHECKS, conform


@pytest.mark.parametrize("mesh", ["dp2", "dp3", "tp2 dp3", "pp2 dp2 tp2"])
@pytest.mark.parametrize("check", CHECKS)
def test_threads_conform(mesh, check):
    counts = run_ranks(mesh, lambda comm: conform(comm, check))
    assert min(counts) > 0


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("check", CHECKS)
def test_where_nobody_is_there_shapes_and_dtypes_conform(check, device):
    mesh = Mesh.parse("dp2 cp2 tp3")
    comm = Comm(mesh, 7, MetaTransport(mesh.size, 7, device=device))
    for what, got, expected in CHECKS[check](comm):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), what
        if "is_completed" in what or "of its own" in what:
            assert torch.equal(got, expected), what


def test_what_nobody_sends_is_zero():
    comm = Comm(Mesh.parse("dp3"), 1, MetaTransport(3, 1, device="cpu"))
    x = torch.ones(2)
    assert comm.all_reduce(x, "dp").tolist() == [1, 1]
    assert comm.all_gather(x, "dp").tolist() == [0] * 6
    assert comm.recv(torch.ones(2), "dp", source=0).tolist() == [0, 0]
