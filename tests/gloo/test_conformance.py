"""The conformance suite over real processes: compared first and not, in one launch for each mesh."""

import warnings

import pytest
import torch

from weft.comm.comm import Comm
from weft.comm.process_groups import ProcessTransport
from weft.testing import run_ranks
from weft.testing.conformance import conform


@pytest.mark.parametrize("mesh", ["dp2", "dp3", "dp2 tp2"])
def test_processes_conform_without_a_warning(mesh):
    def both(comm):
        warnings.simplefilter("error")
        checked = conform(comm)
        with comm.unchecked():
            return checked, conform(comm)

    counts = run_ranks(mesh, both, transport="processes")
    assert all(checked == unchecked > 100 for checked, unchecked in counts)


def test_a_group_may_be_connected_while_nothing_is_compared():
    def begin(comm):
        with comm.unchecked():
            return conform(comm, "overlapping", "messages")

    assert min(run_ranks("pp2 dp2 tp2", begin, transport="processes")) > 0


@pytest.mark.gpu
def test_devices_conform_over_nccl(tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")

    def both(comm):
        place = f"file://{tmp_path}/store"
        transport = ProcessTransport(comm.rank, comm.mesh.size, place, device=f"cuda:{comm.rank}")
        on_device = Comm(comm.mesh, comm.rank, transport)
        checked = conform(on_device)
        with on_device.unchecked():
            return checked, conform(on_device)

    counts = run_ranks("dp2", both, transport="processes")
    assert all(checked == unchecked > 100 for checked, unchecked in counts)
