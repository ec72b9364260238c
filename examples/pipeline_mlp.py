"""Pipeline parallelism from send and recv: each rank holds one stage, micro-batches follow each other, in 1F1B order.

    .venv/bin/python examples/pipeline_mlp.py

              activations ──>              ──>              ──>
    x ──> stage 0 on rank 0   stage 1 on rank 1   stage 2 on rank 2   stage 3 on rank 3 ──> loss
              <── gradients              <──              <──

The life of rank r of R has three parts:

    warm-up     R-1-r forwards: until the later stages have work too
    steady      one forward, one backward, one forward ...: no rank holds more than R-r micro-batches
    cool-down   the remaining backwards

The example draws all of it, from the table that weft itself runs; and every rank compares what it
did with its row.
Source: Narayanan et al. 2021, Efficient Large-Scale Language Model Training on GPU Clusters.
"""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from example_tools import gradient, same, say, table
from torch import Tensor, nn

import weft
from weft import Comm, Work
from weft.schedule.catalog import make_table
from weft.schedule.simulate import simulate
from weft.view.text import draw

RANKS, MICROBATCHES, ROWS, WIDTH = 4, 6, 24, 5


class Stage:
    """One rank's part of the chain, and the micro-batches whose backward has not run."""

    def __init__(
        self, block: nn.Module, comm: Comm, batches: tuple[tuple[Tensor, Tensor], ...]
    ) -> None:
        self.block, self.comm, self.batches = block, comm, batches
        self.me = comm.index("pp")
        self.is_first, self.is_last = self.me == 0, self.me == RANKS - 1
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}
        self.sends: list[Work] = []
        self.loss = torch.zeros((), dtype=torch.float64)
        self.actions: list[str] = []
        self.peak_activations = 0

    def forward(self, mb: int) -> None:
        """Receive the input, compute, send the output; save both for the backward."""
        inputs, targets = self.batches[mb]
        x = (
            inputs
            if self.is_first
            else self.comm.recv(torch.empty_like(inputs), "pp", source=self.me - 1)
        )
        y = self.block(x.requires_grad_(not self.is_first))
        if self.is_last:
            y = F.mse_loss(y, targets) / MICROBATCHES
            self.loss += y.detach()
        else:  # not waited for: the neighbour may be sending to this rank
            self.sends.append(self.comm.start_send(y.detach(), "pp", to=self.me + 1))
        self.saved[mb] = x, y
        self.peak_activations = max(self.peak_activations, len(self.saved))
        self.actions.append(f"F{self.me}.{mb}")

    def backward(self, mb: int) -> None:
        """Receive the gradient of the output, compute, send the gradient of the input."""
        x, y = self.saved.pop(mb)
        y.backward(
            None if self.is_last else self.comm.recv(torch.empty_like(y), "pp", source=self.me + 1)
        )
        if not self.is_first:
            self.sends.append(self.comm.start_send(gradient(x), "pp", to=self.me - 1))
        self.actions.append(f"B{self.me}.{mb}")

    def run(self) -> None:
        """1F1B."""
        warmup = min(RANKS - 1 - self.me, MICROBATCHES)
        for mb in range(warmup):
            self.forward(mb)
        for mb in range(warmup, MICROBATCHES):
            self.forward(mb)
            self.backward(mb - warmup)
        for mb in range(MICROBATCHES - warmup, MICROBATCHES):
            self.backward(mb)
        for work in self.sends:
            work.wait()


def chain() -> list[nn.Module]:
    """One block a stage; the same on every rank, because every rank has the same seed."""
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(RANKS)]


def main() -> None:
    comm = weft.init(f"pp{RANKS}", device="cpu")
    me, blocks = comm.index("pp"), chain()
    x, y = (
        torch.randn(ROWS, WIDTH, dtype=torch.float64),
        torch.randn(ROWS, WIDTH, dtype=torch.float64),
    )

    alone = copy.deepcopy(blocks)  # one process, the whole chain and the whole batch
    loss = F.mse_loss(nn.Sequential(*alone)(x), y)
    loss.backward()

    batches = tuple(zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True))
    stage = Stage(copy.deepcopy(blocks[me]), comm, batches)
    stage.run()
    same("by hand: loss", comm.all_reduce(stage.loss, "pp"), loss.detach())
    for name, param in alone[me].named_parameters():
        same(
            f"by hand: gradient of {name} of stage {me}",
            gradient(stage.block.get_parameter(name)),
            gradient(param),
        )

    plan = make_table("1f1b", ranks=RANKS, microbatches=MICROBATCHES)
    say(comm, draw(simulate(plan)))
    table(
        comm,
        ("first actions, by hand", "saved at most"),
        (" ".join(stage.actions[:8]), str(stage.peak_activations)),
    )
    assert stage.actions == [str(act) for act in plan.rows[me]], (
        "the actions by hand are this rank's row of the table"
    )

    pipe = weft.PipelineParallel(
        blocks, comm, loss=F.mse_loss, example=batches[0][0], microbatches=MICROBATCHES
    )
    same("weft: loss", pipe.step(x, y), loss.detach())
    for own, param in zip(pipe.parameters(), alone[me].parameters(), strict=True):
        same(f"weft: gradient of stage {me}", gradient(own), gradient(param))

    comm.barrier("pp")
    say(
        comm,
        f"\nequal: loss and gradients of {RANKS} stages are those of one process, by hand and by weft",
    )


if __name__ == "__main__":
    main()
