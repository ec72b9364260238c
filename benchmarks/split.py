"""CPU seconds of the two halves of a split backward against the whole, turn by turn, on one thread, with memory as a rank has it.

python benchmarks/split.py [--rounds 15]

A step is a forward and its backward through two llama3 layers; 1.00 would be: the split costs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from weft.models import FAMILIES
from weft.models.common.batch import chain, token_batch
from weft.parallel.autograd.split_backward import SplitBackward
from weft.run.rank_setup import keep_freed_memory

SIZES = ((128, 352, 128), (256, 704, 256), (512, 1408, 256), (1024, 2816, 256))
"""Width, feed-forward width, tokens of each of two sequences."""


class Clock:
    """CPU seconds of this process, by what was done."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def __call__(self, name: str, act: Callable[[], object]) -> None:
        start = time.process_time()
        act()
        self.seconds.setdefault(name, []).append(time.process_time() - start)

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])


def measure(dim: int, ffn: int, length: int, rounds: int) -> Clock:
    config = FAMILIES["llama3"].Config(layers=2, dim=dim, heads=8, kv_heads=8, ffn=ffn)
    blocks = {name: block for name, block in FAMILIES["llama3"].blocks(config).items() if name.startswith("layer")}
    params = [param for block in blocks.values() for param in block.parameters()]
    tokens = torch.zeros(2, length, dtype=torch.int64)
    batch, x, dy = (
        token_batch(tokens, tokens),
        torch.randn(2, length, dim).requires_grad_(),
        torch.randn(2, length, dim),
    )
    clock, out = Clock(), []

    def forward() -> None:
        out.append(chain(blocks, x, batch).x)

    def split_forward(split: SplitBackward) -> None:
        with split:
            forward()

    for _ in range(rounds):
        clock("F", forward)
        clock("B", lambda: out.pop().backward(dy))
        split = SplitBackward(params)
        clock("split F", lambda split=split: split_forward(split))
        clock("I", lambda: out.pop().backward(dy))
        clock("W", split.backward_weights)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    for dim, ffn, length in SIZES:
        clock = measure(dim, ffn, length, rounds)
        ms = {name: 1000 * clock.median(name) for name in clock.seconds}
        halves, whole = ms["split F"] + ms["I"] + ms["W"], ms["F"] + ms["B"]
        told = ", ".join(f"{name} {value:.1f}" for name, value in ms.items())
        print(f"dim {dim}, 2 x {length} tokens: {told} ms; split / whole {halves / whole:.3f}")


if __name__ == "__main__":
    main()
