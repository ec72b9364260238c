"""weft's data and tensor parallelism against torch's own, in the same processes on the same numbers."""

from __future__ import annotations

import tempfile

import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.comm.comm import Comm
from weft.core.axes import span
from weft.parallel.data_parallel.ddp import DistributedDataParallel
from weft.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear
from weft.testing import run_ranks

CLOSE = {"rtol": 1e-12, "atol": 1e-14}
"""Float64 sums of a few terms in another order."""


def mlp() -> nn.Sequential:
    torch.manual_seed(4)
    up = nn.Linear(6, 12)
    down = nn.Linear(12, 6)
    return nn.Sequential(up, nn.Tanh(), down).double()


def inputs(rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(5, 6, dtype=torch.float64, generator=generator)


def join_torch(comm: Comm, folder: str) -> None:
    """Initialise torch.distributed's world beside weft's."""
    store = dist.FileStore(f"{folder}/torch", comm.mesh.size)
    dist.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.mesh.size)


def test_distributed_data_parallel_equals_torchs() -> None:
    folder = tempfile.mkdtemp()

    def rank(comm: Comm) -> list[tuple[Tensor, Tensor]]:
        join_torch(comm, folder)
        theirs = nn.parallel.DistributedDataParallel(mlp())
        ours = DistributedDataParallel(mlp(), comm, bucket_bytes=256)
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (theirs, ours)]
        for step in range(3):
            for net, optimizer in zip((theirs, ours), optimizers, strict=True):
                optimizer.zero_grad()
                loss = net(inputs(10 * step + comm.rank)).square().mean()
                loss.backward()
                if net is ours:
                    net.finish_gradient_synchronization()
                optimizer.step()
        pairs = zip(theirs.module.parameters(), ours.module.parameters(), strict=True)
        found = [(a.detach(), b.detach()) for a, b in pairs]
        dist.destroy_process_group()
        return found

    for pairs in run_ranks("dp3", rank, transport="processes"):
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, **CLOSE)


def test_column_and_row_parallel_linears_equal_dtensors() -> None:
    folder = tempfile.mkdtemp()

    def rank(comm: Comm) -> list[tuple[Tensor, Tensor]]:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        join_torch(comm, folder)
        whole = mlp()
        lo, hi = span(12, comm.degree("tp"), comm.index("tp"))
        column = ColumnParallelLinear(6, 12, comm=comm, dtype=torch.float64)
        row = RowParallelLinear(12, 6, comm=comm, dtype=torch.float64)
        with torch.no_grad():
            column.weight.copy_(whole[0].weight[lo:hi])
            column.bias.copy_(whole[0].bias[lo:hi])
            row.weight.copy_(whole[2].weight[:, lo:hi])
            row.bias.copy_(whole[2].bias)
        theirs = parallelize_module(
            whole,
            init_device_mesh("cpu", (comm.degree("tp"),)),
            {"0": ColwiseParallel(), "2": RowwiseParallel()},
        )
        x = inputs(0).requires_grad_()
        mine = inputs(0).requires_grad_()
        y = theirs(x)
        ours = row(torch.tanh(column(mine)))
        y.square().mean().backward()
        ours.square().mean().backward()
        local = [theirs[0].weight, theirs[0].bias, theirs[2].weight, theirs[2].bias]
        our_params = (column.weight, column.bias, row.weight, row.bias)
        found = [(y.detach(), ours.detach()), (x.grad, mine.grad)]
        for param, our_param in zip(local, our_params, strict=True):
            gradient = param.grad.to_local().clone()
            found.append((gradient, our_param.grad))
        dist.destroy_process_group()
        return found

    for pairs in run_ranks("tp2", rank, transport="processes"):
        for theirs, ours in pairs:
            torch.testing.assert_close(ours, theirs, **CLOSE)
