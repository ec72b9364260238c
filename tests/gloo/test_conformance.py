"""The conformance suite over processes, with and without comparing signatures, in one launch per mesh."""

import warnings

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.testing import run_ranks
from weft.testing.conformance import conform

MIN_COMPARISONS = 100


def conform_twice(comm):
    """Comparisons of the whole suite with and without comparing signatures."""
    checked = conform(comm)
    with comm.unchecked():
        unchecked = conform(comm)
    return checked, unchecked


@pytest.mark.parametrize("mesh", ["dp2", "dp3", pytest.param("dp2 tp2", marks=pytest.mark.slow)])
def test_processes_conform_without_a_warning(mesh):
    def on_rank(comm):
        warnings.simplefilter("error")
        return conform_twice(comm)

    for checked, unchecked in run_ranks(mesh, on_rank, transport="processes"):
        assert checked == unchecked > MIN_COMPARISONS


def test_a_group_may_be_connected_by_unchecked_calls():
    def on_rank(comm):
        with comm.unchecked():
            return conform(comm, "overlapping", "messages")

    counts = run_ranks("pp2 dp2 tp2", on_rank, transport="processes")
    assert min(counts) > 0


@pytest.mark.gpu
def test_devices_conform_over_nccl(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    def on_rank(comm):
        store = f"file://{tmp_path}/store"
        transport = ProcessTransport(comm.rank, comm.mesh.size, store, device=f"cuda:{comm.rank}")
        return conform_twice(Comm(comm.mesh, comm.rank, transport))

    for checked, unchecked in run_ranks("dp2", on_rank, transport="processes"):
        assert checked == unchecked > MIN_COMPARISONS
