"""Training steps over the policy of NCCL: no layout deadlocks where kernels of a group run one after the other."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore

from tests.device import fake_nccl
from tests.device.fake_nccl import FakeNccl, FakeNcclTransport, World
from tests.one_device import micro_batches
from weft.comm import backends
from weft.comm.comm import Comm
from weft.comm.group import StepGroups, planned_groups
from weft.config.load import load
from weft.config.run import plan_of
from weft.core.mesh import Mesh
from weft.errors import CommError
from weft.models import FAMILIES
from weft.models.common.batch import token_batch
from weft.train.build_training import build_step, step_groups

TINY = (
    "--model.layers 4 --model.dim 16 --model.heads 4 --model.kv_heads 2 --model.ffn 32 "
    "--data.seq_len 16 --batch.global_size 8 --batch.micro_size 1 "
    "--precision.params float64 --precision.compute float64 --precision.reduce float64"
)
EXPERTS = (
    "--model.name deepseek --model.layers 3 --data.seq_len 16 --batch.global_size 8 "
    "--batch.micro_size 1 --precision.params float64 --precision.compute float64 "
    "--precision.reduce float64"
)
NUM_STEPS = 3
"""Two that compare signatures, one that does not."""
slow = pytest.mark.slow

LAYOUTS = [
    ("pp4", "--pipeline.schedule zero_bubble", TINY),
    pytest.param("pp2", "--pipeline.schedule zbv --pipeline.chunks 2", TINY, marks=slow),
    pytest.param("pp2", "--pipeline.schedule interleaved --pipeline.chunks 2", TINY, marks=slow),
    pytest.param("pp4", "--pipeline.schedule gpipe", TINY, marks=slow),
    pytest.param("pp2 tp2 dp2", "--parallel.zero 1 --model.tied True", TINY, marks=slow),
    pytest.param("pp2 dp2 cp2", "--parallel.zero 1", TINY, marks=slow),
    pytest.param("dp2 tp2", "--parallel.zero 3 --parallel.sequence True", TINY, marks=slow),
    pytest.param("dp2", "--parallel.zero 3", TINY),
    pytest.param("dp3", "--parallel.zero 2 --batch.global_size 9", TINY, marks=slow),
    pytest.param("cp4", "", TINY, marks=slow),
    pytest.param("cp3", "--data.seq_len 24", TINY, marks=slow),
    pytest.param("ep2", "", EXPERTS, marks=slow),
]


@pytest.fixture(autouse=True)
def nccl(monkeypatch):
    """CPU tensors travel as CUDA tensors do, by the fake."""
    monkeypatch.setitem(backends.POLICIES, "cpu", backends.NCCL)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "world", World(), raising=False)


def run_on_ranks(mesh, function, steps=StepGroups()):  # noqa: B008 - frozen
    """`function(comm)` on a rank thread each; results in rank order."""
    store = HashStore()
    results, errors = {}, []

    def run(rank):
        transport = FakeNcclTransport(rank, mesh.size, store, timeout_s=60)
        try:
            transport.connect_groups(planned_groups(mesh, rank, steps=steps))
            comm = Comm(mesh, rank, transport)
            results[rank] = function(comm)
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
        finally:
            transport.close()

    threads = []
    for rank in range(mesh.size):
        threads.append(threading.Thread(target=run, args=(rank,)))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(mesh.size)]


def losses_of(mesh, options, model):
    """Losses and gradient norms of some steps, on each rank."""
    argv = ["--mesh", mesh, *model.split(), *options.split()]
    run = load(argv, FAMILIES)
    plan = plan_of(run)
    generator = torch.Generator().manual_seed(0)
    shape = (plan.global_size, run.data.seq_len + 1)
    tokens = torch.randint(0, 200, shape, generator=generator)
    whole = token_batch(tokens[:, :-1], tokens[:, 1:])

    def train(comm):
        step = build_step(run, comm)
        numbers = []
        for number in range(NUM_STEPS):
            comm.checked = number < 2
            report = step(micro_batches(whole, plan, comm.rank), lr=1e-3)
            numbers += [report.loss, report.grad_norm]
        return numbers

    return run_on_ranks(run.device_mesh, train, step_groups(run))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mesh", "options", "model"), LAYOUTS)
def test_steps_do_not_deadlock_and_compute_what_one_rank_computes(mesh, options, model):
    one_rank_options = " ".join(
        word
        for pair in zip(options.split()[::2], options.split()[1::2], strict=True)
        if pair[0].startswith(("--model", "--data", "--batch"))
        for word in pair
    )
    (expected,) = losses_of("", one_rank_options, model)
    for found in losses_of(mesh, options, model):
        assert found == pytest.approx(expected, rel=1e-9)


def test_a_rank_that_sends_and_receives_at_once_must_group_them():
    mesh = Mesh.parse("dp3")

    def exchange(comm):
        x = torch.full((4,), float(comm.rank))
        out = torch.empty(4)
        with comm.grouped_messages():
            sending = comm.start_send(x, "dp", to=(comm.rank + 1) % 3)
            source = (comm.rank - 1) % 3
            receiving = comm.start_recv(out, "dp", source=source)
        receiving.wait()
        sending.wait()
        return out[0].item()

    assert run_on_ranks(mesh, exchange) == [2.0, 0.0, 1.0]


def test_without_a_group_they_wait_for_each_other(monkeypatch):
    monkeypatch.setattr(fake_nccl, "DEADLOCK_S", 0.1)

    def exchange(comm):
        sending = comm.start_send(torch.ones(4), "dp", to=1 - comm.rank)
        comm.recv(torch.empty(4), "dp", source=1 - comm.rank)
        sending.wait()

    with pytest.raises(CommError, match="deadlock"):
        run_on_ranks(Mesh.parse("dp2"), exchange)


def test_messages_to_one_rank_are_launched_apart_and_keep_their_order():
    mesh = Mesh.parse("pp2")

    def exchange(comm):
        tensors = [torch.full((2,), float(number)) for number in range(3)]
        with comm.grouped_messages():
            if comm.rank == 0:
                works = [comm.start_send(x, "pp", to=1) for x in tensors]
            else:
                works = [comm.start_recv(torch.empty(2), "pp", source=0) for _ in tensors]
        return [work.wait()[0].item() for work in works]

    assert run_on_ranks(mesh, exchange) == [[0.0, 1.0, 2.0]] * 2


def test_one_communicator_for_each_group_all_split_from_the_world():
    mesh = Mesh.parse("pp2 dp2 cp2")
    run_on_ranks(mesh, lambda comm: None)
    world, *others = FakeNccl.world.communicators
    assert world.size == 8
    expected = len(planned_groups(mesh, 0, steps=StepGroups())) - 1
    assert len(world.splits) == expected
    assert sum(communicator.size for communicator in others) == 8 * len(world.splits)


def test_reductions_of_zero_3_travel_beside_the_gathers_in_one_order_on_all_ranks():
    argv = ["--mesh", "dp2", *TINY.split(), "--parallel.zero", "3"]
    run = load(argv, FAMILIES)
    losses_of("dp2", "--parallel.zero 3", TINY)
    communicators = FakeNccl.world.communicators
    assert len(communicators) == len(planned_groups(run.device_mesh, 0, steps=step_groups(run)))
    gathering, reducing = (set(kernel_ops(each)) for each in communicators)
    assert "allgather" in gathering
    assert "reduce_scatter" not in gathering
    assert reducing <= {"reduce_scatter", "allreduce"}, "signatures are compared by all-reduces"


def kernel_ops(communicator):
    return [name.split()[0] for name in communicator.log]
