"""The device of each rank: assignment of GPUs, refusal to share one, and what prevents a fork."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch.distributed import HashStore

from weft.comm.process_groups import ProcessTransport
from weft.core.mesh import Mesh
from weft.errors import LaunchError
from weft.run import devices, rank_setup, worker_group
from weft.run.devices import GpuInventory, assign_device, check_exclusive, find_gpus
from weft.run.world import World

NONE = GpuInventory()
ONE, TWO, EIGHT = (GpuInventory(number, number) for number in (1, 2, 8))
HIDDEN = GpuInventory(0, 4)
CPU_BUILD = GpuInventory(0, 4, has_cuda=False)
BOUND = GpuInventory(1, 8)


@pytest.mark.parametrize(
    ("choice", "gpus", "starter", "expected"),
    [
        ("auto", NONE, "fork", ["cpu", "cpu"]),
        ("auto", NONE, "threads", ["cpu", "cpu"]),
        ("auto", TWO, "fork", ["cuda:0", "cuda:1"]),
        ("cuda", TWO, "fork", ["cuda:0", "cuda:1"]),
        ("auto", EIGHT, "fork", ["cuda:0", "cuda:1"]),
        ("auto", EIGHT, "launcher", ["cuda:0", "cuda:1"]),
        ("auto", BOUND, "launcher", ["cuda:0", "cuda:0"]),  # --gpus-per-task=1
        ("cuda", BOUND, "launcher", ["cuda:0", "cuda:0"]),
        ("auto", ONE, "threads", ["cuda:0", "cuda:0"]),
        ("cpu", EIGHT, "fork", ["cpu", "cpu"]),
        ("auto", HIDDEN, "fork", ["cpu", "cpu"]),
        ("auto", CPU_BUILD, "launcher", ["cpu", "cpu"]),
    ],
)
def test_devices_of_two_local_ranks(choice, gpus, starter, expected):
    found = []
    for rank in range(2):
        assignment = assign_device(choice, gpus, local_rank=rank, local_size=2, starter=starter)
        found.append(assignment.device)
    assert found == expected


def test_four_rank_threads_are_spread_over_two_gpus():
    found = []
    for rank in range(4):
        assignment = assign_device("auto", TWO, local_rank=rank, local_size=4, starter="threads")
        found.append(assignment.device)
    assert found == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("choice", "gpus", "starter", "note"),
    [
        ("auto", NONE, "fork", ""),
        ("auto", TWO, "fork", "device cuda:0 to cuda:1"),
        ("auto", EIGHT, "fork", "device cuda:0 to cuda:1; 6 GPUs idle"),
        ("auto", BOUND, "launcher", "device cuda:0 of the 1 GPU that the launcher gave"),
        ("auto", ONE, "threads", "2 rank threads share 1 GPU"),
        ("cpu", EIGHT, "fork", "device cpu as asked: 8 GPUs idle"),
        ("auto", HIDDEN, "fork", "device cpu: 4 GPUs of this machine idle, because CUDA_VIS"),
        ("auto", CPU_BUILD, "fork", "4 GPUs of this machine idle, because this torch is built"),
    ],
)
def test_the_note_names_the_devices_and_the_idle_gpus(choice, gpus, starter, note):
    assignment = assign_device(choice, gpus, local_rank=0, local_size=2, starter=starter)
    assert note in assignment.note
    assert bool(note) == bool(assignment.note)


@pytest.mark.parametrize("choice", ["auto", "cuda"])
def test_too_few_gpus_are_an_error_and_never_the_cpu(choice):
    with pytest.raises(LaunchError) as caught:
        assign_device(choice, ONE, local_rank=0, local_size=2, starter="fork")
    assert str(caught.value) == (
        "device: not enough GPUs (got 1 GPU for 2 local ranks; need one for each rank). "
        "Fix: use fewer ranks, --transport threads to share a GPU, or --device cpu"
    )


@pytest.mark.parametrize(
    ("gpus", "fix"),
    [(HIDDEN, "check CUDA_VISIBLE_DEVICES"), (CPU_BUILD, "install a torch with CUDA")],
)
def test_device_cuda_without_a_visible_gpu_is_an_error(gpus, fix):
    with pytest.raises(LaunchError, match=fix):
        assign_device("cuda", gpus, local_rank=0, local_size=1, starter="fork")


def test_finding_gpus_does_not_start_cuda():
    assert find_gpus().num_visible == torch.cuda.device_count()
    assert not torch.cuda.is_initialized()


@dataclass
class Claimed:
    """Claims of one rank in a dictionary of all."""

    rank: int
    owners: dict[str, int] = field(default_factory=dict)

    def claim(self, name: str) -> int:
        return self.owners.setdefault(name, self.rank)


def test_two_ranks_with_one_gpu_are_rejected_by_its_uuid():
    owners: dict[str, int] = {}
    check_exclusive(Claimed(0, owners), "GPU-a")
    check_exclusive(Claimed(1, owners), "GPU-b")
    with pytest.raises(LaunchError, match="ranks 1 and 2 would share one GPU"):
        check_exclusive(Claimed(2, owners), "GPU-b")


def test_ranks_of_a_world_claim_names_through_the_store():
    store = HashStore()
    transports = [ProcessTransport(rank, 2, store) for rank in range(2)]
    assert [transport.claim("gpu a") for transport in transports] == [0, 0]
    assert [transport.claim("gpu b") for transport in reversed(transports)] == [1, 1]
    for transport in transports:
        transport.close()


def test_a_fork_is_refused_where_autograd_threads_run(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "has_autograd_threads", lambda: True)
    with pytest.raises(LaunchError, match=r"autograd's device threads .* Fix: start the ranks"):
        worker_group.fork_workers(2, tmp_path)


def test_a_fork_in_which_cuda_cannot_start_is_explained(monkeypatch):
    def fail(device: object) -> object:
        raise RuntimeError("CUDA error: initialization error\nFor debugging ...")

    monkeypatch.setattr(torch.cuda, "get_device_properties", fail)
    with pytest.raises(LaunchError, match=r"had asked its driver .* PYTORCH_NVML_BASED_CUDA_CHECK"):
        devices.gpu_uuid(torch.device("cuda:0"))


def test_a_rank_process_claims_its_gpu_before_it_connects(monkeypatch):
    """Two processes that see one GPU as theirs end with an error, not in NCCL."""

    class Transport:
        def __init__(self, rank, *args, **options):
            self.rank = rank

        def claim(self, name):
            return 0

        def close(self):
            pass

    monkeypatch.setattr(rank_setup, "ProcessTransport", Transport)
    monkeypatch.setattr(rank_setup, "gpu_uuid", lambda device: "GPU-a")
    world = World(rank=1, size=2, local_rank=0, local_size=1, rendezvous="tcp://host:1")
    monkeypatch.setattr(rank_setup, "own_address", lambda world: None)
    opened = rank_setup.open_comm(world, Mesh.parse("dp2"), torch.device("cuda:0"))
    with pytest.raises(LaunchError, match="ranks 0 and 1 would share one GPU"), opened:
        pass
