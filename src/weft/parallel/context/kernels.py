"""Attention of one block of queries to one block of keys, forward and backward: torch's fused kernels, and a plain one.

Note [Blocks add up]
    With scores s = scale q k^T and lse = log sum exp(s) over the keys of a block, the softmax over
    several blocks is the blocks' outputs weighted by exp(lse - global lse). And the gradients of
    one block, computed with the *global* output and lse, are its part of the global gradients: dq,
    dk and dv of all blocks just add up. Nothing but q, out and lse is saved, no S x S scores exist.
    Source: Dao 2023 (FlashAttention-2); Liu et al. 2023 (ring attention).

All kernels take q_BHSK, k_BGTK and v_BGTK (T keys, G divides H) of one head size and return
out_BHSK and lse_BHS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.common.dropout import times_factors

aten: Any = torch.ops.aten

NO_WEIGHT = float("-inf")


@dataclass(frozen=True)
class Scores:
    """How the scores of a block are computed.

    Attributes:
        scale: factor of q k^T.
        causal: query i attends to keys 0..i of the block.
        mask: [B or 1, 1, Sq, Sk] or None, True where a query attends to a key; excludes `causal`.
        softcap: scores s become softcap * tanh(s / softcap).
        head_bias: slopes [H]: scores get -slope * distance.
        distance: query column - key column, [Sq, Sk]; given with `head_bias`.
        factors: of dropout, by number type: the weights of the softmax are multiplied by these,
            [B, H, Sq, Sk]; lse is that of all keys.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None
    softcap: float | None = None
    head_bias: Tensor | None = None
    distance: Tensor | None = None
    factors: Callable[[torch.dtype], Tensor] | None = None

    def dropped(self, weights: Tensor) -> Tensor:
        """Weights of the softmax, or gradients of them, after dropout."""
        if self.factors is None:
            return weights
        return times_factors(weights, self.factors)


class BlockGradients(NamedTuple):
    """Gradients of one block, shaped like q, k and v, and like the slopes where there are any."""

    q: Tensor
    k: Tensor
    v: Tensor
    head_bias: Tensor | None = None


class Block(NamedTuple):
    """Queries, keys and values of one block."""

    q: Tensor
    k: Tensor
    v: Tensor

    @property
    def head_size(self) -> int:
        """The larger one of the head sizes of keys and values."""
        return max(self.q.shape[-1], self.v.shape[-1])

    def padded(self, size: int) -> Block:
        """With zeros behind each head, up to a head size: they change no score."""
        return Block(_pad(self.q, size), _pad(self.k, size), _pad(self.v, size))


class BlockOutput(NamedTuple):
    """Output over all blocks, and the gradient that it received."""

    grad: Tensor
    out: Tensor
    lse: Tensor


Forward = Callable[[Block, Scores], tuple[Tensor, Tensor]]
"""block, scores -> out, lse."""

Backward = Callable[[Block, BlockOutput, Scores], BlockGradients]
"""block, output, scores -> gradients."""


class Kernel(NamedTuple):
    """An attention kernel. Both functions take q, k and v of one head size, a multiple of
    `head_unit`.
    """

    forward: Forward
    backward: Backward
    head_unit: int = 1


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """q_BHSK, k_BGTK, v_BGTW (T keys, G divides H) -> out_BHSW and lse_BHS, float32 at least.

    A query that attends to no key has output 0 and lse -inf.
    """
    kernel = _choose_kernel(q, scores)
    block = Block(q, k, v)
    size = _padded_head_size(kernel, block)
    padded_out, lse = kernel.forward(block.padded(size), scores)
    out = _unpad(padded_out, v)
    if scores.mask is not None:
        # kernels disagree on rows without a key: 0 and lse 0, or not a number
        attends_to_nothing = ~scores.mask.any(-1)
        out = out.masked_fill(attends_to_nothing.unsqueeze(-1), 0.0)
        lse = lse.masked_fill(attends_to_nothing, NO_WEIGHT)
    return out, lse


def attend_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    """The block's part of the gradients, from the output over all blocks."""
    kernel = _choose_kernel(block.q, scores)
    size = _padded_head_size(kernel, block)
    padded_output = BlockOutput(_pad(output.grad, size), _pad(output.out, size), output.lse)
    padded = kernel.backward(block.padded(size), padded_output, scores)
    return BlockGradients(
        _unpad(padded.q, block.q),
        _unpad(padded.k, block.k),
        _unpad(padded.v, block.v),
        padded.head_bias,
    )


def _choose_kernel(q: Tensor, scores: Scores) -> Kernel:
    others = (scores.softcap, scores.head_bias, scores.factors)
    if any(other is not None for other in others):
        return PLAIN
    if not q.is_cuda:
        return CPU
    if q.dtype == torch.float64:
        return PLAIN
    if q.dtype == torch.float32 or scores.mask is not None:
        return CUDA_EFFICIENT
    return CUDA_FLASH


def _padded_head_size(kernel: Kernel, block: Block) -> int:
    """Fused kernels take one head size for q, k and v, a multiple of their unit."""
    unit = kernel.head_unit
    num_units = -(-block.head_size // unit)  # rounded up
    return num_units * unit


def _pad(x: Tensor, size: int) -> Tensor:
    missing = size - x.shape[-1]
    if not missing:
        return x
    return F.pad(x, (0, missing))


def _unpad(padded: Tensor, like: Tensor) -> Tensor:
    """Without the zeros behind each head."""
    size = like.shape[-1]
    return padded[..., :size]


def _mask_as_bias(scores: Scores, dtype: torch.dtype) -> Tensor | None:
    mask = scores.mask
    if mask is None:
        return None
    bias = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return bias.masked_fill_(~mask, NO_WEIGHT)


def _cpu_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
        *block,
        0.0,
        scores.causal,
        attn_mask=_mask_as_bias(scores, block.q.dtype),
        scale=scores.scale,
    )
    return out, lse


def _cpu_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        output.grad,
        *block,
        output.out,
        output.lse,
        0.0,
        scores.causal,
        attn_mask=_mask_as_bias(scores, block.q.dtype),
        scale=scores.scale,
    )
    return BlockGradients(dq, dk, dv)


def _flash_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(
        *block, 0.0, scores.causal, False, scale=scores.scale
    )
    return out, lse


def _flash_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    no_dropout_state = torch.zeros(2, dtype=torch.uint64, device=block.q.device)  # as forward's
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        output.grad,
        *block,
        output.out,
        output.lse.contiguous(),
        None,
        None,
        block.q.shape[2],
        block.k.shape[2],
        0.0,
        scores.causal,
        no_dropout_state,
        no_dropout_state,
        scale=scores.scale,
    )
    return BlockGradients(dq, dk, dv)


EFFICIENT_ROWS = 32
"""The memory-efficient kernel keeps lse in rows of a multiple of this."""
EFFICIENT_BIAS = 16
"""The memory-efficient kernel reads a bias whose rows lie a multiple of this apart."""


def _efficient_bias(q: Tensor, k: Tensor, scores: Scores) -> Tensor | None:
    bias = _mask_as_bias(scores, q.dtype)
    if bias is None:
        return None
    num_keys = k.shape[2]
    batch_size, num_heads, *_ = q.shape
    missing = -num_keys % EFFICIENT_BIAS
    aligned = F.pad(bias, (0, missing))[..., :num_keys]
    return aligned.expand(batch_size, num_heads, -1, -1)


def _repeat_heads(x_BGTK: Tensor, q_BHSK: Tensor) -> Tensor:
    group_size = q_BHSK.shape[1] // x_BGTK.shape[1]
    return x_BGTK.repeat_interleave(group_size, dim=1)


def _sum_heads(x_BHTK: Tensor, k_BGTK: Tensor) -> Tensor:
    """Gradients of repeated key heads -> of the heads themselves."""
    grouped: Tensor = x_BHTK.unflatten(1, (k_BGTK.shape[1], -1))
    return grouped.sum(2)


def _efficient_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = block
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q,
        _repeat_heads(k, q),
        _repeat_heads(v, q),
        _efficient_bias(q, k, scores),
        True,
        0.0,
        scores.causal,
        scale=scores.scale,
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    q, k, v = block
    missing_rows = -output.lse.shape[-1] % EFFICIENT_ROWS
    padded_lse = F.pad(output.lse, (0, missing_rows))
    no_dropout_state = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        output.grad,
        q,
        _repeat_heads(k, q),
        _repeat_heads(v, q),
        _efficient_bias(q, k, scores),
        output.out,
        padded_lse.contiguous(),
        no_dropout_state,
        no_dropout_state,
        0.0,
        (True, True, True, False),
        scores.causal,
        scale=scores.scale,
    )
    return BlockGradients(dq, _sum_heads(dk, k), _sum_heads(dv, k))


def _raw_scores(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """Before soft-cap, bias and mask: [B, H, Sq, Sk]."""
    k_per_query = _repeat_heads(k, q)
    dots = q @ k_per_query.transpose(-1, -2)
    return dots * scores.scale


def _final_scores(raw: Tensor, scores: Scores) -> Tensor:
    """Capped, biased and masked: [B, H, Sq, Sk]."""
    final = raw
    if scores.softcap is not None:
        final = scores.softcap * torch.tanh(raw / scores.softcap)
    if scores.head_bias is not None and scores.distance is not None:
        slopes = scores.head_bias[:, None, None]
        final = final - slopes * scores.distance
    allowed = scores.mask
    if scores.causal:
        square = torch.ones_like(raw[:1, :1], dtype=torch.bool)
        allowed = square.tril()
    if allowed is None:
        return final
    return final.masked_fill(~allowed, NO_WEIGHT)


def _plain_forward(block: Block, scores: Scores) -> tuple[Tensor, Tensor]:
    q, k, v = block
    wide = torch.promote_types(q.dtype, torch.float32)
    raw = _raw_scores(q, k, scores).to(wide)
    final = _final_scores(raw, scores)
    lse = final.logsumexp(-1)
    weights = scores.dropped(final.softmax(-1)).to(v.dtype)
    out = weights @ _repeat_heads(v, q)
    return out, lse


def _plain_backward(block: Block, output: BlockOutput, scores: Scores) -> BlockGradients:
    q, k, v = block
    grad, out, lse = output
    wide = lse.dtype
    k_per_query = _repeat_heads(k, q)
    v_per_query = _repeat_heads(v, q)
    raw = _raw_scores(q, k, scores).to(wide)
    final = _final_scores(raw, scores)
    weights = torch.exp(final - lse.unsqueeze(-1))
    dweights = scores.dropped((grad @ v_per_query.transpose(-1, -2)).to(wide))
    dots = (grad * out).to(wide)
    mean_dweights = dots.sum(-1, keepdim=True)
    dfinal = weights * (dweights - mean_dweights)
    dhead_bias: Tensor | None = None
    if scores.head_bias is not None and scores.distance is not None:
        by_slope = dfinal * scores.distance
        dhead_bias = -by_slope.sum((0, 2, 3))
    draw = dfinal
    if scores.softcap is not None:
        capped = torch.tanh(raw / scores.softcap)
        slope = 1 - capped.square()
        draw = dfinal * slope
    dscaled = (draw * scores.scale).to(q.dtype)
    dq = dscaled @ k_per_query
    dk_per_query = dscaled.transpose(-1, -2) @ q
    narrow_weights = scores.dropped(weights).to(q.dtype)
    dv_per_query = narrow_weights.transpose(-1, -2) @ grad
    return BlockGradients(dq, _sum_heads(dk_per_query, k), _sum_heads(dv_per_query, v), dhead_bias)


CPU = Kernel(_cpu_forward, _cpu_backward)
"""float64, float32, bfloat16, float16; masks; fewer key heads. Returns shapes on the meta device,
too.
"""
CUDA_FLASH = Kernel(_flash_forward, _flash_backward, head_unit=8)
"""bfloat16 and float16 without a mask; fewer key heads."""
CUDA_EFFICIENT = Kernel(_efficient_forward, _efficient_backward, head_unit=8)
"""float32 and 16-bit types, with a mask as a bias; as many key heads as query heads."""
PLAIN = Kernel(_plain_forward, _plain_backward)
"""Every feature, with all scores of the block in memory: what no fused kernel computes, and the
reference in tests.
"""
