"""Attention of whole sequences on one device, block by block: no mask and no scores of all queries and keys exist."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.core.attention_choice import AttentionDevice
from weft.core.query_blocks import RowBlock, have_disjoint_keys
from weft.models.common import attention_kernels as kernels
from weft.models.common.attention_kernels import Scores, wide_dtype
from weft.models.common.attention_sinks import sinks_gradient, with_sinks
from weft.models.common.attention_spec import AttentionSpec, visible_keys

# Note [Attention in blocks]
# q, k, v, the output and the log-sum-exp of each query are kept between forward and backward, nothing else. The backward
# computes the scores of a block again, as every fused kernel does (Dao 2023, FlashAttention-2). Where kernels compute no
# dropout, soft-cap or bias of heads, the scores of some queries exist at a time. With weights w = softmax(s) and factors f
# of dropout, out = (w f) v, so for a gradient g of out
#
#     dv = (w f)^T g       dw = f (g v^T)       ds = w (dw - sum(w dw)) = w (dw - g . out)


@dataclass(frozen=True)
class SequenceAttention:
    """One attention over whole sequences.

    Attributes:
        blocks: in which each query stands once, see core/query_blocks.py.
        documents: documents_BS; read where the documents of a sequence are mixed.
        device: whose kernels stand for those of the meta device.
    """

    spec: AttentionSpec
    blocks: tuple[RowBlock, ...]
    documents: Tensor | None = None
    device: AttentionDevice | None = None

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor) -> Tensor:
        """out_BSHW; differentiable once."""
        out: Tensor = _SequenceAttentionFunction.apply(  # type: ignore[no-untyped-call]
            q_BSHK, k_BSGK, v_BSGW, self.spec.sinks, self.spec.head_bias, self
        )
        return out

    def scores(self, block: RowBlock, q_BSHK: Tensor) -> Scores:
        """How the scores of a block are computed."""
        spec = self.spec
        columns_S = torch.arange(q_BSHK.shape[1], device=q_BSHK.device)
        queries, keys = columns_S[block.queries], columns_S[block.keys]
        factors = None
        if spec.draws is not None:
            draws = spec.draws.select_rows(block.rows)
            factors = partial(draws.factors, queries, keys, length=len(columns_S))
        return Scores(
            spec.scale_of(q_BSHK),
            causal=block.kind == "triangle",
            mask=self._mask(block, queries, keys) if block.kind == "partial" else None,
            softcap=spec.softcap,
            head_bias=spec.head_bias,
            distance=None if spec.head_bias is None else queries[:, None] - keys,
            factors=factors,
        )

    def _mask(self, block: RowBlock, queries: Tensor, keys: Tensor) -> Tensor | None:
        """True where a query attends to a key, [1, 1, Sq, Sk]."""
        allowed = visible_keys(self.spec.mask, queries, keys)
        if block.is_mixed and self.documents is not None:
            numbers_S = self.documents[block.rows].squeeze(0)
            is_same = numbers_S[queries][:, None] == numbers_S[keys]
            allowed = is_same if allowed is None else is_same & allowed
        return None if allowed is None else allowed[None, None]


class _SequenceAttentionFunction(torch.autograd.Function):
    """See Note [Attention in blocks]."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSHK: Tensor,
        k_BSGK: Tensor,
        v_BSGW: Tensor,
        sinks: Tensor | None,
        head_bias: Tensor | None,
        attention: SequenceAttention,
    ) -> Tensor:
        rows, length, heads, _ = q_BSHK.shape
        out_BSHW = q_BSHK.new_empty(rows, length, heads, v_BSGW.shape[-1])
        lse_BHS = q_BSHK.new_empty(rows, heads, length, dtype=wide_dtype(q_BSHK.dtype))
        for block in attention.blocks:
            q, k, v = _block_inputs(block, q_BSHK, k_BSGK, v_BSGW)
            out, lse = kernels.attend(
                q, k, v, attention.scores(block, q_BSHK), device=attention.device
            )
            if sinks is not None:
                # each query stands in one block, so the sinks are added once
                out, lse = with_sinks(out.to(lse.dtype), lse, sinks)
            out_BSHW[block.rows, block.queries] = out.transpose(1, 2)
            lse_BHS[block.rows, :, block.queries] = lse
        # the output as it was rounded: the kernels' backward is derived from it
        ctx.save_for_backward(q_BSHK, k_BSGK, v_BSGW, out_BSHW, lse_BHS, sinks)
        ctx.attention = attention
        return out_BSHW

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BSHW: Tensor) -> tuple[Tensor | None, ...]:
        q_BSHK, k_BSGK, v_BSGW, out_BSHW, lse_BHS, sinks = ctx.saved_tensors
        attention: SequenceAttention = ctx.attention
        dtype = q_BSHK.dtype
        dq = torch.empty_like(q_BSHK, memory_format=torch.contiguous_format)
        sums = _KeySums(k_BSGK, v_BSGW, attention.blocks)
        dhead_bias: Tensor | None = None
        for block in attention.blocks:
            inputs = kernels.Block(*_block_inputs(block, q_BSHK, k_BSGK, v_BSGW))
            output = kernels.BlockOutput(
                grad_BSHW[block.rows, block.queries].transpose(1, 2),
                out_BSHW[block.rows, block.queries].transpose(1, 2),
                lse_BHS[block.rows, :, block.queries],
            )
            scores = attention.scores(block, q_BSHK)
            found = kernels.attend_backward(inputs, output, scores, device=attention.device)
            dq[block.rows, block.queries] = found.q.transpose(1, 2)
            sums.add(block, found)
            if found.head_bias is not None:
                dhead_bias = found.head_bias if dhead_bias is None else dhead_bias + found.head_bias
        head_bias = attention.spec.head_bias
        if dhead_bias is not None and head_bias is not None:
            dhead_bias = dhead_bias.to(head_bias.dtype)
        dsinks: Tensor | None = None
        if sinks is not None:
            swapped = (grad_BSHW.transpose(1, 2), out_BSHW.transpose(1, 2))
            dsinks = sinks_gradient(sinks, *swapped, lse_BHS)
        return dq, sums.dk.to(dtype), sums.dv.to(dtype), dsinks, dhead_bias, None


class _KeySums:
    """Gradients of keys and values: sums over the blocks in which they stand, in float32 at least."""

    def __init__(self, k_BSGK: Tensor, v_BSGW: Tensor, blocks: tuple[RowBlock, ...]) -> None:
        # then nothing is added up, and no sums in float32 are needed
        self.is_disjoint = have_disjoint_keys(blocks)
        self.dk = self._empty(k_BSGK)
        self.dv = self._empty(v_BSGW)

    def _empty(self, x: Tensor) -> Tensor:
        if self.is_disjoint:
            return torch.empty_like(x, memory_format=torch.contiguous_format)
        wide = wide_dtype(x.dtype)
        return torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format)

    def add(self, block: RowBlock, found: kernels.BlockGradients) -> None:
        """Those of one block."""
        dk = self.dk[block.rows, block.keys]
        dv = self.dv[block.rows, block.keys]
        if self.is_disjoint:
            dk.copy_(found.k.transpose(1, 2))
            dv.copy_(found.v.transpose(1, 2))
        else:
            dk += found.k.transpose(1, 2)
            dv += found.v.transpose(1, 2)


def _block_inputs(
    block: RowBlock, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """q_BHQK, k_BGTK and v_BGTW of a block."""
    return (
        q_BSHK[block.rows, block.queries].transpose(1, 2),
        k_BSGK[block.rows, block.keys].transpose(1, 2),
        v_BSGW[block.rows, block.keys].transpose(1, 2),
    )
