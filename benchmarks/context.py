"""CPU seconds of attention across cp, all ranks together, against one fused attention on the whole sequence.

python benchmarks/context.py [--length 4096] [--rounds 5]

Ranks are threads with one intra-op thread each; CPU seconds of a thread do not count what it waits for, so other work on
the machine and ranks that share a core do not spoil the ratio. 1.00 would be: no work is added by the cut.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.attention_mask import AttentionMask
from weft.core.sequence import zigzag
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.parallel.context.attend import VARIANTS
from weft.testing import run_ranks

HEADS, KV_HEADS, HEAD_SIZE = 8, 4, 64


def cpu_seconds(attend: torch.nn.Module, given: tuple[Tensor, ...], grad: Tensor) -> tuple[float, float]:
    """Of one forward and of one backward, on this thread."""
    leaves = [x.detach().requires_grad_() for x in given]
    nothing = torch.zeros(given[0].shape[:2], dtype=torch.int64)
    start = time.thread_time()
    out = attend(*leaves, Batch(nothing, nothing, nothing))
    middle = time.thread_time()
    out.backward(grad)
    return middle - start, time.thread_time() - middle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--window", type=int, help="of a sliding-window mask; default: none")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mask = AttentionMask(window=options.window)
    whole = [torch.randn(1, options.length, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)]

    def rank(comm: Comm, variant: str) -> tuple[float, float]:
        spans = zigzag(options.length, comm.degree("cp"), comm.index("cp"))
        *given, grad = (torch.cat([x[:, span.start : span.stop] for span in spans], dim=1) for x in whole)
        attend = Attend(mask=mask)
        attend.implementation = VARIANTS[variant](comm)
        return cpu_seconds(attend, tuple(given), grad)

    for degree in (2, 4):
        for variant in VARIANTS:
            ratios, balance = [], []
            for _ in range(options.rounds):
                one = cpu_seconds(Attend(mask=mask), tuple(whole[:3]), whole[3])
                ranks = run_ranks(f"cp{degree}", lambda comm, variant=variant: rank(comm, variant))
                ratios.append([sum(part) / alone for part, alone in zip(zip(*ranks, strict=True), one, strict=True)])
                balance.append(max(map(sum, ranks)) * degree / sum(map(sum, ranks)))
            forward, backward = (statistics.median(column) for column in zip(*ratios, strict=True))
            print(
                f"cp{degree} {variant:9} of {options.length} tokens: forward {forward:.2f}, backward {backward:.2f} times one"
                f" attention; slowest rank {statistics.median(balance):.2f} times the mean"
            )


if __name__ == "__main__":
    main()
