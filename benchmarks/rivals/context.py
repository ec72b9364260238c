"""Context parallelism compared with torch's ring on the CPU kernel, and with a plain all-gather of keys and values.

`torch.distributed.tensor.experimental.context_parallel` itself does not run on the CPU (docs/LOG.md has its errors): it
dispatches attention by CUDA's operators only. The ring that it would run, `_templated_ring_attention` and its backward,
takes the operator as an argument, so it is compared with the CPU's operator. Both sides shard sequences alike: torch's
head-tail load balancing is weft's zigzag.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from benchmarks.rivals.training import (
    PlainModel,
    Step,
    Training,
    clip_gradients,
    torch_adamw,
    torch_step,
)
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_single_autograd
from torch.distributed.tensor.experimental._context_parallel import _attention as torch_attention

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch

MESH = "cp2"
aten: Any = torch.ops.aten


def ring(training: Training) -> dict[str, Step]:
    """Keys and values rotate between ranks."""
    return {
        "torch's ring, alltoall, CPU kernel": _torch_cp_step(training, _TorchRing("alltoall")),
        "cp2 ring, trainer": _trainer_step(training, "ring"),
    }


def gathered_ring(training: Training) -> dict[str, Step]:
    """Keys and values are all-gathered once, torch's default."""
    return {
        "torch's ring, allgather, CPU kernel": _torch_cp_step(training, _TorchRing("allgather")),
        "cp2 ring, trainer": _trainer_step(training, "ring"),
        "cp2 allgather, trainer": _trainer_step(training, "allgather"),
    }


def plain_gather(training: Training) -> dict[str, Step]:
    """The short implementation by hand: all-gather keys and values, then one masked attention over all of them."""
    return {
        "all_gather of K and V, one attention": _torch_cp_step(training, _PlainGather(training)),
        "cp2 ring, trainer": _trainer_step(training, "ring"),
    }


COMPARISONS = {"cp ring": ring, "cp gather": gathered_ring, "cp plain": plain_gather}


def _trainer_step(training: Training, variant: str) -> Step:
    return training.weft_step(micro_size=training.size.sequences, context=variant)


class _TorchRing(nn.Module):
    """torch's ring attention in place of `Attend`; `method` is its rotation, "alltoall" or "allgather"."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def forward(
        self,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        batch: Batch,
    ) -> Tensor:
        torch_attention.set_rotate_method(self.method)
        q_BHSK = q_BSHK.transpose(1, 2)
        k_BHSK = k_BSHK.transpose(1, 2)
        v_BHSK = v_BSHK.transpose(1, 2)
        out_BHSK: Tensor = _TorchRingFunction.apply(q_BHSK, k_BHSK, v_BHSK)
        return out_BHSK.transpose(1, 2)


class _TorchRingFunction(torch.autograd.Function):
    """torch's ring forward and backward with the flash attention kernel of the CPU."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = torch_attention._templated_ring_attention(
            dist.group.WORLD,
            2,
            aten._scaled_dot_product_flash_attention_for_cpu,
            q,
            k,
            v,
            is_causal=True,
        )
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        return torch_attention._templated_ring_attention_backward(
            dist.group.WORLD,
            2,
            _cpu_flash_backward,
            grad,
            "grad_out",
            q,
            k,
            v,
            out,
            lse,
            True,
            dropout_p=0.0,
        )


def _cpu_flash_backward(*, logsumexp: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
    """The CPU's backward with the keyword arguments of CUDA's."""
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        kwargs["grad_out"],
        kwargs["query"],
        kwargs["key"],
        kwargs["value"],
        kwargs["out"],
        logsumexp,
        0.0,
        kwargs["is_causal"],
    )


class _PlainGather(nn.Module):
    """Attention over all-gathered keys and values, with the causal mask of this rank's queries."""

    def __init__(self, training: Training) -> None:
        super().__init__()
        positions_by_rank = []
        for rank in range(training.comm.mesh.size):
            columns = training.columns(rank)
            positions_by_rank.append(columns.positions[0])
        query_positions = positions_by_rank[training.comm.rank]
        key_positions = torch.cat(positions_by_rank)
        self.mask = query_positions[:, None] >= key_positions[None, :]

    def forward(
        self,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        batch: Batch,
    ) -> Tensor:
        kv = torch.stack((k_BSHK, v_BSHK))
        k_all_BSHK, v_all_BSHK = all_gather_single_autograd(kv, 2, dist.group.WORLD)
        out_BHSK = F.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2),
            k_all_BSHK.transpose(1, 2),
            v_all_BSHK.transpose(1, 2),
            attn_mask=self.mask,
        )
        return out_BHSK.transpose(1, 2)


def _torch_cp_step(training: Training, attention: nn.Module) -> Step:
    """The model on one device with `attention` in place of each `Attend`; DDP averages gradients over the ranks."""
    blocks = training.plain_blocks()
    for block in blocks.values():
        paths = [path for path, module in block.named_modules() if isinstance(module, Attend)]
        for path in paths:
            block.set_submodule(path, attention)
    net = nn.parallel.DistributedDataParallel(PlainModel(blocks), gradient_as_bucket_view=True)
    return torch_step(
        training,
        net,
        training.columns(training.comm.rank),
        optimizer=torch_adamw(net.parameters()),
        before_update=lambda: clip_gradients(net),
    )
