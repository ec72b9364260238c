"""Context parallelism against torch's: the ring of torch's context_parallel on the CPU kernel, and a plain all-gather.

`torch.distributed.tensor.experimental.context_parallel` itself does not run here (docs/LOG.md has what it says): it takes
attention apart by the operators that CUDA chooses and knows nothing of the CPU's. What it would play is its ring,
`_templated_ring_attention` and its backward; those take the operator as an argument, so they are raced with the CPU's.
Both sides cut sequences alike: torch's head-tail balance is our zigzag.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.rivals.course import CLIP, Chain, Course, Step, torch_adamw
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch

MESH = "cp2"
aten: Any = torch.ops.aten


def ring(course: Course) -> dict[str, Step]:
    """Keys and values pass from rank to rank."""
    return {
        "torch's ring, alltoall, CPU kernel": _torchs(course, _Ring("alltoall")),
        "cp2 ring, trainer": course.weft_step(micro=course.size.sequences, context="ring"),
    }


def gathered_ring(course: Course) -> dict[str, Step]:
    """Keys and values are gathered once, torch's default."""
    return {
        "torch's ring, allgather, CPU kernel": _torchs(course, _Ring("allgather")),
        "cp2 ring, trainer": course.weft_step(micro=course.size.sequences, context="ring"),
        "cp2 allgather, trainer": course.weft_step(micro=course.size.sequences, context="allgather"),
    }


def plain_gather(course: Course) -> dict[str, Step]:
    """What one would write by hand: gather keys and values, one attention with a mask over all of them."""
    return {
        "all_gather of K and V, one attention": _torchs(course, _Gather(course)),
        "cp2 ring, trainer": course.weft_step(micro=course.size.sequences, context="ring"),
    }


LINES = {"cp ring": ring, "cp gather": gathered_ring, "cp plain": plain_gather}


class _Ring(nn.Module):
    """torch's own ring at the `Attend` seam."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def forward(self, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, batch: Batch) -> Tensor:
        torchs.set_rotate_method(self.method)
        out: Tensor = _TorchsRing.apply(*(x.transpose(1, 2) for x in (q_BSHK, k_BSHK, v_BSHK)))
        return out.transpose(1, 2)


class _TorchsRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kernel = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = torchs._templated_ring_attention(dist.group.WORLD, 2, kernel, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return torchs._templated_ring_attention_backward(
            dist.group.WORLD, 2, _cpu_backward, grad, "grad_out", q, k, v, out, lse, True, dropout_p=0.0
        )


def _cpu_backward(*, logsumexp: Tensor, **given: Any) -> tuple[Tensor, ...]:
    names = ("grad_out", "query", "key", "value", "out")
    tensors = (given[name] for name in names)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(*tensors, logsumexp, 0.0, given["is_causal"])


class _Gather(nn.Module):
    """All keys and values on every rank; the mask lets each query see what lies before it."""

    def __init__(self, course: Course) -> None:
        super().__init__()
        positions = [
            course.batch.columns(index=rank, degree=course.comm.mesh.size).positions[0]
            for rank in range(course.comm.mesh.size)
        ]
        self.mask = positions[course.comm.rank][:, None] >= torch.cat(positions)[None, :]

    def forward(self, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, batch: Batch) -> Tensor:
        k, v = all_gather_single_autograd(torch.stack((k_BSHK, v_BSHK)), 2, dist.group.WORLD)
        q, k, v = (x.transpose(1, 2) for x in (q_BSHK, k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2)


def _torchs(course: Course, attend: nn.Module) -> Step:
    """The plain model with `attend` at its seam; DDP averages gradients over the ranks that share the sequence."""
    blocks = course.plain_blocks()
    for block in blocks.values():
        for path, module in list(block.named_modules()):
            if isinstance(module, Attend):
                block.set_submodule(path, attend)
    net = nn.parallel.DistributedDataParallel(Chain(blocks), gradient_as_bucket_view=True)
    optimizer = torch_adamw(net.parameters())
    mine = course.batch.columns(index=course.comm.rank, degree=course.comm.mesh.size)

    def step() -> float:
        optimizer.zero_grad()
        loss = net(mine)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), CLIP)
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        return total.item() / course.comm.mesh.size

    return step
