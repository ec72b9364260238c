"""Batch statistics of all ranks, ranks with unequal numbers of batches, and states of optimizers for any number of ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from tests.parallel.test_as_torch import RTOL, WRAPPERS, Script, Wrap, ddp, zero3
from weft.comm.comm import Comm
from weft.errors import DataError, PlanError
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.data_parallel.sync_batch_norm import SyncBatchNorm
from weft.parallel.zero.sharded_optimizer import ShardedOptimizer
from weft.testing import run_ranks


def norms() -> nn.Sequential:
    torch_generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(2, 3, 1), nn.BatchNorm1d(3), nn.Tanh(), nn.BatchNorm1d(3, momentum=None)
    )
    with torch.no_grad():
        for param in net.parameters():
            param.copy_(torch.rand(param.shape, generator=torch_generator))
    return net.double()


def test_batch_statistics_are_those_of_the_whole_batch() -> None:
    x = torch.randn(7, 2, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def train(net: nn.Module, x: Tensor, weight: float) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            (net(x).square() * torch.arange(4.0)).sum().mul(weight).backward()
            optimizer.step()

    alone = norms()
    train(alone, x, 1.0)

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = SyncBatchNorm.convert(norms(), comm)
        assert sum(isinstance(each, SyncBatchNorm) for each in net.modules()) == 2
        own = x[:3] if comm.rank == 0 else x[3:]  # unequal parts
        train(DistributedDataParallel(net, comm), own, 2.0)  # the mean over two ranks is the sum
        return net.state_dict()

    for state in run_ranks("dp2", rank):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-12)


def test_options_of_torch_are_taken_as_torch_takes_them() -> None:
    net = nn.BatchNorm1d(2, dtype=torch.float64)

    def rank(comm: Comm) -> Tensor:
        wrapped = DistributedDataParallel(
            copy.deepcopy(net),
            comm,
            device_ids=["cpu"],
            bucket_cap_mb=1,
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
        wrapped(torch.full((2, 2), float(comm.rank), dtype=torch.float64)).sum().backward()
        with pytest.raises(PlanError, match="did you mean 'find_unused_parameters'"):
            DistributedDataParallel(nn.Linear(2, 2), comm, find_unused_parameter=True)
        with pytest.raises(PlanError, match=r"Fix: comm=weft.init\(mesh\)"):
            DistributedDataParallel(nn.Linear(2, 2), comm, process_group=object())
        with pytest.raises(PlanError, match="output_device: is no option"):
            DistributedDataParallel(nn.Linear(2, 2), comm, output_device="meta")
        assert wrapped.module.running_mean is not None
        return wrapped.module.running_mean

    first, second = run_ranks("dp2", rank)
    assert not torch.equal(first, second), "each rank has its own buffers"


@pytest.mark.parametrize("by_present", [False, True])
def test_ranks_with_fewer_batches_take_part_in_the_steps_of_the_others(by_present: bool) -> None:
    """Rank 0 has 1 batch, rank 1 has 3, rank 2 has 2: rank 1 alone takes the last step."""
    counts = [1, 3, 2]

    def gradient_of(net: nn.Module, step: int) -> Tensor:
        x = torch.full((2, 3), float(step + 1), dtype=torch.float64)
        loss: Tensor = net(x).square().mean()
        return loss

    def layer() -> nn.Linear:
        net = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            net.weight.fill_(0.3)
            net.bias.fill_(0.1)
        return net

    alone = layer()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.05)
    for step in range(max(counts)):
        present = sum(count > step for count in counts)
        optimizer.zero_grad()
        share = 1.0 if by_present else present / len(counts)
        (gradient_of(alone, step) * share).backward()
        optimizer.step()

    def rank(comm: Comm) -> dict[str, Tensor]:
        net = DistributedDataParallel(layer(), comm)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        with net.join(divide_by_initial_world_size=not by_present):
            for step in range(counts[comm.rank]):
                optimizer.zero_grad()
                gradient_of(net, step).backward()
                optimizer.step()
        return net.full_state_dict()

    for state in run_ranks("dp3", rank):
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-12, atol=0)


@pytest.mark.parametrize("is_sharded_optimizer", [False, True])
@pytest.mark.parametrize("wrap", WRAPPERS)
def test_whole_states_of_an_optimizer_go_on_on_another_number_of_ranks(
    wrap: Wrap, is_sharded_optimizer: bool
) -> None:
    if is_sharded_optimizer and wrap is not ddp:
        pytest.skip("shards have sharded states already")

    def make(net: Any, comm: Comm | None) -> torch.optim.Optimizer:
        weights = [param for param in net.parameters() if param.ndim > 1]
        others = [param for param in net.parameters() if param.ndim <= 1]
        groups = [{"params": weights, "weight_decay": 0.1}, {"params": others}]
        if is_sharded_optimizer and comm is not None:
            return ShardedOptimizer(groups, torch.optim.AdamW, comm, lr=0.05)
        return torch.optim.AdamW(groups, lr=0.05)

    alone = Script(None, None)
    optimizer = make(alone.plain, None)
    alone.train(optimizer, steps=6)

    def save(comm: Comm) -> tuple[dict[str, Tensor], dict[str, Any]]:
        script = Script(wrap, comm)
        net = script.wrapped()
        optimizer = make(net, comm)
        script.train(optimizer)
        return script.values(), net.full_optim_state_dict(optimizer)

    def go_on(comm: Comm) -> dict[str, Tensor]:
        values, states = copy.deepcopy(saved)
        script = Script(wrap, comm)
        script.plain.load_state_dict(values)
        net = script.wrapped()
        optimizer = make(net, comm)
        net.load_optim_state_dict(optimizer, states)
        script.train(optimizer, first=3)
        with pytest.raises(DataError, match="are of groups of other parameters"):
            net.load_optim_state_dict(torch.optim.AdamW(net.parameters()), states)
        return script.values()

    saved, *_ = run_ranks("dp4", save)
    assert saved[1]["state"]["first.weight"]["exp_avg"].shape == (5, 3)
    for values in run_ranks("dp2", go_on):
        for name, value in alone.values().items():
            torch.testing.assert_close(values[name], value, rtol=RTOL, atol=RTOL)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_shards_are_saved_by_torch_distributed_checkpoint(tmp_path: Any) -> None:
    """On two ranks; read on one, and into a module that is not wrapped, with torch's own functions."""

    def save(comm: Comm) -> tuple[dict[str, Any], dict[str, Tensor]]:
        store = f"file://{tmp_path}/store"
        dist.init_process_group("gloo", init_method=store, rank=comm.rank, world_size=2)
        script = Script(zero3, comm)
        net = script.wrapped()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        script.train(optimizer)
        state = {"net": net.state_dict(), "optim": net.optim_state_dict(optimizer)}
        dcp.save(state, checkpoint_id=tmp_path / "saved")
        states = net.full_optim_state_dict(optimizer)
        script.train(optimizer, first=3)
        return states, script.values()

    def go_on(comm: Comm) -> dict[str, Tensor]:
        script = Script(zero3, comm)
        net = script.wrapped()
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
        script.train(optimizer, first=9)
        state = {"net": net.state_dict(), "optim": net.optim_state_dict(optimizer)}
        dcp.load(state, checkpoint_id=tmp_path / "saved")
        net.load_state_dict(state["net"])
        net.load_optim_state_dict(optimizer, state["optim"])
        script.train(optimizer, first=3)
        return script.values()

    (states, expected), _ = run_ranks("dp2", save, transport="processes")
    (values,) = run_ranks("dp1", go_on)
    alone = Script(None, None)
    optimizer = torch.optim.AdamW(alone.plain.parameters(), lr=0.05)

    state = {"net": alone.plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    alone.plain.load_state_dict(state["net"])
    set_optimizer_state_dict(alone.plain, optimizer, states)
    alone.train(optimizer, first=3)
    for found in (values, alone.values()):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=RTOL, atol=RTOL)
