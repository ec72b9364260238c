"""Data parallelism from one primitive: every rank has the whole model and a part of the batch.

    .venv/bin/python examples/data_parallel_mlp.py

    rank 0   rows  0- 7 ──> model ──> loss ──> gradients ─┐     ┌─> sum ──> the same update
    rank 1   rows  8-15 ──> model ──> loss ──> gradients ─┼─ + ─┼─> sum ──> the same update
    rank 2   rows 16-23 ──> model ──> loss ──> gradients ─┤     ├─> sum ──> the same update
    rank 3   rows 24-31 ──> model ──> loss ──> gradients ─┘     └─> sum ──> the same update
                                                        all_reduce

The loss of the batch is a mean over 32 rows. So each rank divides the sum over its own 8 rows by
32, not by 8: then the gradients of all ranks simply add up to that of one process.

The second half does the same with overlap. A backward computes the gradients of the last layer
first; they can be reduced while those of the first layer are still being computed:

    compute   │ backward of layer 1 │ backward of layer 0 │
    network   │                     │ all_reduce bucket 1 │ all_reduce bucket 0 │ <- only this is waited for
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import torch
from example_tools import gradient, same_gradients, say
from torch import Tensor, nn

import weft
from weft import Comm, Work

RANKS, ROWS, STEPS, LR = 4, 32, 3, 0.1


@dataclass
class Bucket:
    """Gradients of one layer in one flat tensor, so that they are reduced in one collective."""

    comm: Comm
    name: str
    params: list[nn.Parameter]
    log: list[str]
    flat: Tensor = field(init=False)
    missing: int = 0
    work: Work | None = None

    def __post_init__(self) -> None:
        sizes = [param.numel() for param in self.params]
        self.flat = torch.zeros(sum(sizes), dtype=torch.float64)
        for param, view in zip(self.params, self.flat.split(sizes), strict=True):
            param.grad = view.view_as(param)  # autograd adds into the bucket from now on
            param.register_post_accumulate_grad_hook(self.on_gradient)

    def clear(self) -> None:
        """Set the gradients to 0, before the next backward."""
        self.flat.zero_()
        self.missing = len(self.params)

    def on_gradient(self, _: Tensor) -> None:
        """Hook: autograd has computed one more gradient; after the last of this bucket, the
        all_reduce starts.
        """
        self.missing -= 1
        if not self.missing:
            self.work = self.comm.start_all_reduce_(self.flat, "dp")
            self.log.append(f"all_reduce of {self.name} starts")

    def wait(self) -> None:
        """Wait for the sum over ranks."""
        assert self.work is not None, "the backward has passed this bucket"
        self.work.wait()
        self.log.append(f"all_reduce of {self.name} has ended")


def model() -> nn.Sequential:
    """The same on every rank, because every rank has the same seed."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def loss(net: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """What these rows add to the mean over the whole batch."""
    total: Tensor = (net(x) - y).square().sum()
    return total / (ROWS * y.shape[1])


def step(net: nn.Module) -> None:
    """Plain gradient descent."""
    with torch.no_grad():
        for param in net.parameters():
            param.sub_(gradient(param), alpha=LR)


def main() -> None:
    comm = weft.init(f"dp{RANKS}", device="cpu")
    alone = model()
    plain, overlapped = copy.deepcopy(alone), copy.deepcopy(alone)
    log: list[str] = []
    buckets = [Bucket(comm, f"layer {i}", [*overlapped[2 * i].parameters()], log) for i in (1, 0)]
    overlapped.get_parameter("0.weight").register_hook(
        lambda _: log.append("gradient of layer 0's weight")
    )
    x, y = torch.randn(ROWS, 6, dtype=torch.float64), torch.randn(ROWS, 3, dtype=torch.float64)
    own_x, own_y = (whole.chunk(RANKS)[comm.index("dp")] for whole in (x, y))
    for number in range(STEPS):
        alone.zero_grad()  # one process, the whole batch
        loss(alone, x, y).backward()

        plain.zero_grad()  # own rows; then every gradient is summed over the ranks
        loss(plain, own_x, own_y).backward()
        for param in plain.parameters():
            comm.all_reduce_(gradient(param), "dp")

        log.clear()  # own rows; gradients are summed while the backward still runs
        for bucket in buckets:
            bucket.clear()
        loss(overlapped, own_x, own_y).backward()
        for bucket in buckets:
            bucket.wait()

        same_gradients(f"step {number}, one by one", plain, alone)
        same_gradients(f"step {number}, in buckets", overlapped, alone)
        for net in (alone, plain, overlapped):
            step(net)
        say(
            comm,
            f"step {number}   loss {comm.all_reduce(loss(alone, own_x, own_y).detach(), 'dp').item():.6f}",
        )
    say(comm, "\nevents of the last backward on rank 0:\n  " + "\n  ".join(log))
    assert log.index("all_reduce of layer 1 starts") < log.index("gradient of layer 0's weight"), (
        "overlap"
    )
    say(
        comm,
        f"\nequal: gradients of {RANKS} ranks x {ROWS // RANKS} rows are those of one process on {ROWS} rows",
    )


if __name__ == "__main__":
    main()
