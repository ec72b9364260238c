"""CPU seconds of attention under context parallelism, summed over ranks, relative to one fused attention on the whole sequence.

python benchmarks/context.py [--length 4096] [--rounds 5]

Ranks are threads with one intra-op thread each. CPU seconds of a thread exclude its waiting, so other programs on the
machine and ranks that share a core do not change the ratio. A ratio of 1.00 means that sharding adds no work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.attention_mask import AttentionMask
from weft.core.sequence import zigzag
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.parallel.context.attend import VARIANTS
from weft.testing import run_ranks

HEADS = 8
KV_HEADS = 4
HEAD_SIZE = 64
DEGREES = (2, 4)


class AttentionTensors(NamedTuple):
    """Inputs of attention, and the gradient of its output; all are BSHK."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor

    def shard(self, comm: Comm) -> AttentionTensors:
        """This rank's positions of each tensor."""
        length = self.q.shape[1]
        spans = zigzag(length, comm.degree("cp"), comm.index("cp"))
        shards = []
        for whole in self:
            parts = [whole[:, span.start : span.stop] for span in spans]
            shards.append(torch.cat(parts, dim=1))
        return AttentionTensors(*shards)


class CpuSeconds(NamedTuple):
    """CPU seconds of one thread for a forward and a backward."""

    forward: float
    backward: float


@dataclass(frozen=True)
class RoundResult:
    """CPU seconds of all ranks relative to one device, and of the slowest rank relative to the mean."""

    forward: float
    backward: float
    imbalance: float


def random_tensors(length: int) -> AttentionTensors:
    return AttentionTensors(
        q=torch.randn(1, length, HEADS, HEAD_SIZE),
        k=torch.randn(1, length, KV_HEADS, HEAD_SIZE),
        v=torch.randn(1, length, KV_HEADS, HEAD_SIZE),
        grad=torch.randn(1, length, HEADS, HEAD_SIZE),
    )


def measure(attend: Attend, tensors: AttentionTensors) -> CpuSeconds:
    """One forward and one backward on this thread."""
    *inputs, grad = tensors
    leaves = [x.detach().requires_grad_() for x in inputs]
    zeros_BS = torch.zeros(grad.shape[:2], dtype=torch.int64)
    batch = Batch(
        inputs=zeros_BS,
        targets=zeros_BS,
        positions=zeros_BS,
    )
    start = time.thread_time()
    out = attend(*leaves, batch)
    middle = time.thread_time()
    out.backward(grad)
    end = time.thread_time()
    return CpuSeconds(forward=middle - start, backward=end - middle)


def measure_rank(
    comm: Comm,
    variant: str,
    mask: AttentionMask,
    whole: AttentionTensors,
) -> CpuSeconds:
    """One rank's share under a context-parallel variant."""
    attend = Attend(mask=mask)
    attend.implementation = VARIANTS[variant](comm)
    return measure(attend, whole.shard(comm))


def run_round(
    degree: int,
    variant: str,
    mask: AttentionMask,
    whole: AttentionTensors,
) -> RoundResult:
    one_device = measure(Attend(mask=mask), whole)

    def rank_main(comm: Comm) -> CpuSeconds:
        return measure_rank(comm, variant, mask, whole)

    ranks = run_ranks(f"cp{degree}", rank_main)
    forward = sum(seconds.forward for seconds in ranks)
    backward = sum(seconds.backward for seconds in ranks)
    slowest = max(seconds.forward + seconds.backward for seconds in ranks)
    mean = (forward + backward) / degree
    return RoundResult(
        forward=forward / one_device.forward,
        backward=backward / one_device.backward,
        imbalance=slowest / mean,
    )


def print_medians(title: str, rounds: list[RoundResult]) -> None:
    forward = statistics.median(result.forward for result in rounds)
    backward = statistics.median(result.backward for result in rounds)
    imbalance = statistics.median(result.imbalance for result in rounds)
    columns = [
        f"CPU seconds relative to one device: forward {forward:.2f}, backward {backward:.2f}",
        f"slowest rank {imbalance:.2f} times the mean",
    ]
    print(f"{title}: {'; '.join(columns)} (measured)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; medians are printed")
    parser.add_argument(
        "--window",
        type=int,
        help="size of a sliding-window mask; default: none",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    mask = AttentionMask(window=args.window)
    whole = random_tensors(args.length)
    for degree in DEGREES:
        for variant in VARIANTS:
            rounds = [run_round(degree, variant, mask, whole) for _ in range(args.rounds)]
            print_medians(f"cp{degree} {variant:9} of {args.length} tokens", rounds)


if __name__ == "__main__":
    main()
