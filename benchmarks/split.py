"""CPU time of a backward split into input gradients (I) and weight gradients (W), relative to a whole backward, on one thread.

python benchmarks/split.py [--rounds 15]

A step is a forward and backward through two llama3 layers, with the memory settings of a rank. A ratio of 1.00 means that
the split costs nothing.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from weft.models import FAMILIES
from weft.models.common.batch import Batch, chain, token_batch
from weft.parallel.autograd.split_backward import SplitBackward
from weft.run.rank_setup import keep_freed_memory

NUM_SEQUENCES = 2
HEADS = 8


@dataclass(frozen=True)
class LayerSize:
    """Width, feed-forward width, and tokens of each sequence."""

    dim: int
    ffn: int
    length: int


SIZES = (
    LayerSize(
        dim=128,
        ffn=352,
        length=128,
    ),
    LayerSize(
        dim=256,
        ffn=704,
        length=256,
    ),
    LayerSize(
        dim=512,
        ffn=1408,
        length=256,
    ),
    LayerSize(
        dim=1024,
        ffn=2816,
        length=256,
    ),
)


class CpuTimer:
    """CPU seconds of this process by operation; the result of an operation is returned."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def measure(
        self,
        name: str,
        operation: Callable[[], Tensor | None],
    ) -> Tensor | None:
        start = time.process_time()
        result = operation()
        seconds = time.process_time() - start
        self.seconds.setdefault(name, []).append(seconds)
        return result

    def median_ms(self) -> dict[str, float]:
        """Median milliseconds by operation."""
        return {name: 1000 * statistics.median(seconds) for name, seconds in self.seconds.items()}


@dataclass(frozen=True)
class Layers:
    """Two layers with an input batch and the gradient of their output."""

    blocks: dict[str, nn.Module]
    batch: Batch
    x: Tensor
    grad: Tensor

    @staticmethod
    def build(size: LayerSize) -> Layers:
        family = FAMILIES["llama3"]
        config = family.Config(
            layers=2,
            dim=size.dim,
            heads=HEADS,
            kv_heads=HEADS,
            ffn=size.ffn,
        )
        all_blocks = family.blocks(config)
        layers = {name: block for name, block in all_blocks.items() if name.startswith("layer")}
        tokens = torch.zeros(NUM_SEQUENCES, size.length, dtype=torch.int64)
        batch = token_batch(tokens, tokens)
        x = torch.randn(NUM_SEQUENCES, size.length, size.dim).requires_grad_()
        grad = torch.randn(NUM_SEQUENCES, size.length, size.dim)
        return Layers(
            layers,
            batch,
            x,
            grad,
        )

    @property
    def params(self) -> list[nn.Parameter]:
        params = []
        for block in self.blocks.values():
            params.extend(block.parameters())
        return params

    def forward(self) -> Tensor:
        return chain(self.blocks, self.x, self.batch).x

    def forward_under(self, split: SplitBackward) -> Tensor:
        """A forward whose backward computes input gradients only; `split.backward_weights` computes the rest."""
        with split:
            return self.forward()


def measure(size: LayerSize, rounds: int) -> dict[str, float]:
    """Median milliseconds of each operation: whole and split backward in turns."""
    layers = Layers.build(size)
    params = layers.params
    timer = CpuTimer()
    for _ in range(rounds):
        measure_whole(layers, timer)
        measure_split(layers, SplitBackward(params), timer)
    return timer.median_ms()


def measure_whole(layers: Layers, timer: CpuTimer) -> None:
    out = timer.measure("F", layers.forward)
    timer.measure("B", lambda: out.backward(layers.grad))


def measure_split(
    layers: Layers,
    split: SplitBackward,
    timer: CpuTimer,
) -> None:
    out = timer.measure("split F", lambda: layers.forward_under(split))
    timer.measure("I", lambda: out.backward(layers.grad))
    timer.measure("W", split.backward_weights)


def print_size(size, ms):
    """Times of the operations, and of the split backward relative to the whole one."""
    split_ms = ms["split F"] + ms["I"] + ms["W"]
    whole_ms = ms["F"] + ms["B"]
    ratio = split_ms / whole_ms
    words = []
    for name, value in ms.items():
        words.append(f"{name} {value:.1f}")
    operations = ", ".join(words)
    title = f"dim {size.dim}, {NUM_SEQUENCES} x {size.length} tokens"
    print(f"{title}: {operations} ms of CPU; split / whole {ratio:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds; medians are printed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    keep_freed_memory()
    for size in SIZES:
        ms = measure(size, args.rounds)
        print_size(size, ms)


if __name__ == "__main__":
    main()
