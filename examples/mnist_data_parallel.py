"""Handwritten digits with data parallelism, two ways, each one line more than one process; the numbers are the same.

    .venv/bin/python examples/mnist_data_parallel.py                    # scikit-learn's 1,797 digits
    .venv/bin/python examples/mnist_data_parallel.py path/to/mnist      # a folder with MNIST's IDX files, gzipped or not

weft.DistributedDataParallel: one process a device, each runs the whole script on its own replica

               ┌─ rows 0 2 4 ... ─> net on rank 0 ─┐ gradients are reduced in buckets
    a batch ───┤                                   ├─ to their mean            ─> the same update on both
               └─ rows 1 3 5 ... ─> net on rank 1 ─┘ while the backward runs

weft.DataParallel: one process, a thread a device; the input is split, the outputs are joined, one
loss

               ┌─ first half ─> replica on device 0 ─┐
    a batch ───┤                                     ├─> outputs ─> loss ─> gradients are summed onto the one net
               └─ second half ─> replica on device 1 ─┘
"""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from example_tools import same, say
from torch import Tensor, nn

import weft
from weft.data.images import digits, read_pair

RANKS, DEVICES, BATCH, EPOCHS, LR, HELD_OUT, MOST = 2, ("cpu", "cpu"), 64, 6, 0.3, 360, 4_000
ALLOWED = 1e-9
"""Largest difference after some hundred updates in float64, each rounded at 1e-16."""


def load(words: list[str]) -> tuple[Tensor, Tensor]:
    """images_ND in 0 to 1, labels_N; shuffled; at most MOST of them."""
    data = read_pair(words[0]) if words else digits()
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))[:MOST]
    images, labels = (
        torch.tensor(data.images).flatten(1).double() / 255,
        torch.tensor(data.labels).long(),
    )
    return images[order], labels[order]


def batches(images: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Every epoch in another order, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(images), generator=generator).split(BATCH):
            if len(rows) == BATCH:
                yield images[rows], labels[rows]


def train(net: nn.Module, data: Iterator[tuple[Tensor, Tensor]]) -> None:
    """The usual training loop, whatever the module is wrapped in."""
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()


def accuracy(net: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Fraction of digits that are classified correctly; it must be above 0.9."""
    with torch.no_grad():
        right: float = (net(images).argmax(1) == labels).double().mean().item()
    assert right > 0.9, f"accuracy is too low: {right:.3f}"
    return right


def main() -> None:
    images, labels = load(sys.argv[1:])  # once, before the ranks start: they share this memory
    folder = tempfile.mkdtemp()
    comm = weft.init(f"dp{RANKS}", device="cpu")
    me = comm.index("dp")
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(images.shape[1], 32), nn.Tanh(), nn.Linear(32, 10)).double()
    on_ranks, on_devices = copy.deepcopy(alone), copy.deepcopy(alone)
    known, unknown = (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])
    say(comm, f"{EPOCHS} epochs of {len(known[0])} digits, {HELD_OUT} held out")

    train(alone, batches(*known))

    ddp = weft.DistributedDataParallel(on_ranks, comm)
    own = ((x[me::RANKS], y[me::RANKS]) for x, y in batches(*known))
    train(ddp, own)
    say(comm, f"DistributedDataParallel, {RANKS} processes: accuracy {accuracy(ddp, *unknown):.3f}")
    for name, param in alone.named_parameters():
        same(
            f"DistributedDataParallel: {name}", on_ranks.get_parameter(name), param, allowed=ALLOWED
        )

    weft.save(f"{folder}/trained", ddp)
    loaded = copy.deepcopy(alone)
    weft.load(f"{folder}/trained", loaded, comm=comm)
    for name, param in ddp.module.named_parameters():
        same(f"loaded: {name}", loaded.get_parameter(name), param, allowed=0)
    say(
        comm,
        f"saved by {RANKS} ranks, loaded into a plain module: {accuracy(loaded, *unknown):.3f}",
    )

    if comm.rank == 0:  # one process alone
        shutil.rmtree(folder)
        dp = weft.DataParallel(on_devices, DEVICES)
        train(dp, batches(*known))
        say(
            comm,
            f"DataParallel, one process, {len(DEVICES)} devices: accuracy {accuracy(dp, *unknown):.3f}",
        )
        for name, param in alone.named_parameters():
            same(f"DataParallel: {name}", on_devices.get_parameter(name), param, allowed=ALLOWED)

    comm.barrier("dp")
    say(
        comm,
        f"\nequal: after {EPOCHS} epochs all weights are those of one process, on {RANKS} ranks and on devices",
    )


if __name__ == "__main__":
    main()
