"""weft's sharded strategies against torch's, in the same processes on the same numbers, in torch.distributed's world."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.comm.comm import Comm
from weft.testing import run_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
"""Float64 sums of a few terms in another order."""


class Net(nn.Module):
    """Widths that no number of ranks divides, a frozen block."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(
            [nn.Linear(7, 13), nn.Linear(13, 11), nn.Linear(11, 5)]
        ).double()
        self.blocks[1].requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(7, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.gain
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def inputs(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(4, 7, dtype=torch.float64, generator=generator)


def join_torch(comm: Comm, folder: str) -> None:
    """Initialise torch.distributed's world."""
    store = dist.FileStore(f"{folder}/torch", comm.mesh.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.mesh.size)


def train(net: nn.Module, rank: int, *, finish: Any, backwards: int = 2) -> None:
    optimizer = torch.optim.AdamW(
        [param for param in net.parameters() if param.requires_grad], lr=1e-2
    )
    for step in range(3):
        optimizer.zero_grad()
        for backward in range(backwards):
            x = inputs(100 * step + 10 * backward + rank)
            loss = net(x).square().mean()
            loss.backward()
        finish()
        optimizer.step()


def test_zero_3_equals_torchs_fsdp2() -> None:
    folder = tempfile.mkdtemp()

    def rank(comm: Comm) -> list[tuple[Tensor, Tensor]]:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        join_torch(comm, folder)
        theirs = Net()
        ours = weft.FullyShardedDataParallel(Net(comm.rank))
        for block in theirs.blocks:
            fully_shard(block)
        fully_shard(theirs)
        train(theirs, comm.rank, finish=lambda: None)
        train(ours, comm.rank, finish=ours.finish_gradient_synchronization)
        state = theirs.state_dict()
        full = ours.full_state_dict()
        assert state.keys() == full.keys()
        found = [
            (x.full_tensor() if isinstance(x, DTensor) else x, full[key])
            for key, x in state.items()
        ]
        dist.destroy_process_group()
        return [(a.detach().clone(), b) for a, b in found]

    for pairs in run_ranks("dp3", rank, transport="processes"):
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, **CLOSE)


def test_sharded_optimizer_equals_torchs_zero_redundancy_optimizer() -> None:
    folder = tempfile.mkdtemp()

    def rank(comm: Comm) -> list[tuple[Tensor, Tensor]]:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        join_torch(comm, folder)
        theirs = nn.parallel.DistributedDataParallel(Net())
        ours = weft.DistributedDataParallel(Net(comm.rank))
        trained = [
            [param for param in net.parameters() if param.requires_grad] for net in (theirs, ours)
        ]
        optimizers = [
            ZeroRedundancyOptimizer(trained[0], torch.optim.AdamW, lr=1e-2, weight_decay=0.3),
            weft.ShardedOptimizer(trained[1], torch.optim.AdamW, lr=1e-2, weight_decay=0.3),
        ]
        for step in range(3):
            for net, optimizer in zip((theirs, ours), optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(inputs(10 * step + comm.rank)).square().mean()
                loss.backward()
                if net is ours:
                    net.finish_gradient_synchronization()
                optimizer.step()
        found = [
            (a.detach(), b.detach())
            for a, b in zip(theirs.parameters(), ours.parameters(), strict=True)
        ]
        dist.destroy_process_group()
        return found

    for pairs in run_ranks("dp3", rank, transport="processes"):
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, **CLOSE)


def test_without_comm_or_torch_distributed_is_an_error() -> None:
    for make in (weft.DistributedDataParallel, weft.FullyShardedDataParallel):
        with pytest.raises(weft.WeftError, match=r"pass comm=weft\.init"):
            make(nn.Linear(2, 2))
