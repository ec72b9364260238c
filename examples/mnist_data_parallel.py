"""Handwritten digits with data parallelism: one line more than one process, and the same numbers.

    .venv/bin/python examples/mnist_data_parallel.py                    # scikit-learn's 1,797 digits
    .venv/bin/python examples/mnist_data_parallel.py path/to/mnist      # a folder with MNIST's IDX files, gzipped or not

               ┌─ rows 0 2 4 ... ─> net on rank 0 ─┐ gradients travel in buckets
    a batch ───┤                                   ├─ and become their mean ─> the same update on both
               └─ rows 1 3 5 ... ─> net on rank 1 ─┘ while the backward runs

weft.DistributedDataParallel has one process a device. Around any module; beside it stands the loop that everybody knows.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from blackboard import same, say
from torch import Tensor, nn

import weft
from weft.train.images import digits, read_pair

RANKS, BATCH, EPOCHS, LR, HELD_OUT, MOST = 2, 64, 6, 0.3, 360, 4_000
ALLOWED = 1e-9
"""Some hundred updates in float64, each rounded at 1e-16, and each a little further from the other."""


def load(words: list[str]) -> tuple[Tensor, Tensor]:
    """images_ND in 0 to 1, labels_N; shuffled; at most MOST of them."""
    data = read_pair(words[0]) if words else digits()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:MOST]
    images, labels = torch.tensor(data.images).flatten(1).double() / 255, torch.tensor(data.labels).long()
    return images[order], labels[order]


def batches(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every epoch in another order, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images), generator=generator).split(BATCH):
            if len(rows) == BATCH:
                yield images[rows], labels[rows]


def train(net: nn.Module, data: Iterator[tuple[Tensor, Tensor]], after_backward: Callable[[], None]) -> None:
    """The loop that everybody knows."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        after_backward()
        optimizer.step()


def main() -> None:
    images, labels = load(sys.argv[1:])  # once, before there are ranks: they share this memory
    comm = weft.init(f"dp{RANKS}", device="cpu")
    me = comm.index("dp")
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(images.shape[1], 32), nn.Tanh(), nn.Linear(32, 10)).double()
    several = copy.deepcopy(alone)
    known, unknown = (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])

    train(alone, batches(*known), lambda: None)

    ddp = weft.DistributedDataParallel(several, comm)
    own = ((x[me::RANKS], y[me::RANKS]) for x, y in batches(*known))
    train(ddp, own, ddp.finish_gradient_synchronization)

    accuracy = (ddp(unknown[0]).argmax(1) == unknown[1]).double().mean().item()
    say(comm, f"accuracy {accuracy:.3f} on {HELD_OUT} digits held out, after {EPOCHS} epochs of {len(known[0])}")
    for name, param in alone.named_parameters():
        same(f"DistributedDataParallel: {name}", several.get_parameter(name), param, allowed=ALLOWED)
    assert accuracy > 0.9, f"it learned less than it should: accuracy {accuracy:.3f}"

    comm.barrier("dp")
    say(comm, f"\nequal: after {EPOCHS} epochs all weights of {RANKS} ranks are those of one process")


if __name__ == "__main__":
    main()
