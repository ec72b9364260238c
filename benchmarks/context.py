"""CPU seconds of attention under context parallelism, summed over ranks, relative to one fused attention on the whole sequence.

python -m benchmarks.context [--length 4096] [--rounds 5]
python -m benchmarks.context --one_device   # documents and windows in blocks, and with a mask of all queries and keys

Ranks are threads with one intra-op thread each. CPU seconds of a thread exclude its waiting, so other programs on the
machine and ranks that share a core do not change the ratio. A ratio of 1.00 means that sharding adds no work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.live import Live
from weft.comm.comm import Comm
from weft.core.attention_mask import AttentionMask
from weft.core.sequence import zigzag
from weft.models.common.attention import Attend, FusedAttention
from weft.models.common.attention_spec import AttentionSpec, visible_keys
from weft.models.common.batch import Batch, token_batch
from weft.parallel.context.attend import VARIANTS
from weft.testing import run_ranks

HEADS = 8
KV_HEADS = 4
HEAD_SIZE = 64
DEGREES = (2, 4)
GPT2_HEADS = 12
ONE_DEVICE_LAYERS = 4
ONE_DEVICE_LENGTHS = (512, 1024, 2048, 4096)
DOCUMENT_LENGTH = 256
"""Mean length of documents, and the window."""


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
    batch = Batch(inputs=zeros_BS, targets=zeros_BS, positions=zeros_BS)
    start = time.thread_time()
    out = attend(*leaves, batch)
    middle = time.thread_time()
    out.backward(grad)
    end = time.thread_time()
    return CpuSeconds(forward=middle - start, backward=end - middle)


def measure_rank(
    comm: Comm, variant: str, mask: AttentionMask, whole: AttentionTensors
) -> CpuSeconds:
    """One rank's share under a context-parallel variant."""
    attend = Attend(mask=mask)
    attend.implementation = VARIANTS[variant](comm)
    return measure(attend, whole.shard(comm))


def run_round(
    degree: int, variant: str, mask: AttentionMask, whole: AttentionTensors
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


class MaskedAttention:
    """One fused attention with a mask [S, S] made in each layer."""

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        columns = torch.arange(q.shape[1])
        allowed = visible_keys(spec.mask, columns, columns)
        if batch.documents is not None:
            same = batch.documents[:, None, :, None] == batch.documents[:, None, None, :]
            allowed = same if allowed is None else same & allowed
        swapped = [x.transpose(1, 2) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*swapped, attn_mask=allowed)
        return out.transpose(1, 2)


class PeakBytes(Live):
    """Most bytes of tensors that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self._made = {key: ref for key, ref in self._made.items() if not ref.expired()}
        self.most = max(self.most, self.num_bytes())
        return out


@dataclass(frozen=True)
class OneDevice:
    """Layers of attention shaped like those of GPT-2 124M, on one device."""

    length: int
    mask: AttentionMask
    documents: Tensor | None

    def run(self, attention: Any) -> float:
        """CPU seconds of a forward and a backward."""
        q, k, v = (
            torch.zeros(1, self.length, GPT2_HEADS, HEAD_SIZE).normal_().requires_grad_()
            for _ in range(3)
        )
        ids = torch.zeros(1, self.length, dtype=torch.int64)
        batch = replace(token_batch(ids, ids), documents=self.documents)
        spec = AttentionSpec(self.mask)
        start = time.thread_time()
        outs = [attention(q, k, v, batch, spec).sum() for _ in range(ONE_DEVICE_LAYERS)]
        torch.stack(outs).sum().backward()
        return time.thread_time() - start

    def peak(self, attention: Any) -> int:
        """Bytes of its tensors."""
        with PeakBytes() as peak:
            self.run(attention)
        return peak.most

    def compare(self, title: str, rounds: int) -> None:
        """Both in turns."""
        pairs = [(self.run(MaskedAttention()), self.run(FusedAttention())) for _ in range(rounds)]
        ratio = statistics.median(blocks / masked for masked, blocks in pairs)
        masked, blocks = (self.peak(each) / 2**20 for each in (MaskedAttention(), FusedAttention()))
        text = f"time {ratio:.2f}, peak {blocks:.0f} of {masked:.0f} MiB ({blocks / masked:.2f})"
        print(f"{title:24} {self.length} tokens: {text}")


def document_numbers(length: int) -> Tensor:
    """Documents of random lengths, DOCUMENT_LENGTH on average."""
    generator = torch.Generator().manual_seed(length)
    lengths = torch.empty(length).exponential_(1 / DOCUMENT_LENGTH, generator=generator)
    counts = lengths.long() + 1
    return torch.arange(length).repeat_interleave(counts)[None, :length]


def compare_one_device(rounds: int) -> None:
    for length in ONE_DEVICE_LENGTHS:
        documents = document_numbers(length)
        OneDevice(length, AttentionMask(), documents).compare("documents", rounds)
        window = AttentionMask(window=DOCUMENT_LENGTH)
        OneDevice(length, window, None).compare("window", rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; medians are printed")
    parser.add_argument("--window", type=int, help="size of a sliding-window mask; default: none")
    parser.add_argument("--one_device", action="store_true", help="blocks against one mask")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one_device:
        compare_one_device(args.rounds)
        return
    mask = AttentionMask(window=args.window)
    whole = random_tensors(args.length)
    for degree in DEGREES:
        for variant in VARIANTS:
            rounds = [run_round(degree, variant, mask, whole) for _ in range(args.rounds)]
            print_medians(f"cp{degree} {variant:9} of {args.length} tokens", rounds)


if __name__ == "__main__":
    main()
