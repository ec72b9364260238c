"""Owns torch's fused attention kernels, one pair of functions each: output and log-sum-exp forward, gradients backward.

All take q_BHSK, k_BGTK and v_BGTK (T keys, G divides H) of one head size and give out_BHSK and lse_BHS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

aten: Any = torch.ops.aten

NO_WEIGHT = float("-inf")


@dataclass(frozen=True)
class Scores:
    """How the scores of a block are made.

    Attributes:
        scale: factor of q k^T.
        causal: query i sees keys 0..i of the block.
        mask: [B, 1, Sq, Sk] or None, True where a query sees a key; excludes `causal`.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None


Forward = Callable[[Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor]]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Scores], tuple[Tensor, Tensor, Tensor]]


class Kernel(NamedTuple):
    """A fused attention. Both functions take q, k and v of one head size, a multiple of `head_unit`."""

    forward: Forward
    backward: Backward
    head_unit: int = 1


def _bias(scores: Scores, dtype: torch.dtype) -> Tensor | None:
    if scores.mask is None:
        return None
    return torch.zeros(scores.mask.shape, dtype=dtype, device=scores.mask.device).masked_fill_(~scores.mask, NO_WEIGHT)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    return cast(
        tuple[Tensor, Tensor],
        aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, scores.causal, attn_mask=_bias(scores, q.dtype), scale=scores.scale
        ),
    )


def _cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    return cast(
        tuple[Tensor, Tensor, Tensor],
        aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, scores.causal, attn_mask=_bias(scores, q.dtype), scale=scores.scale
        ),
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, scores.causal, False, scale=scores.scale)
    return out, lse


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    no_draws = torch.zeros(2, dtype=torch.int64, device=q.device)
    return cast(
        tuple[Tensor, Tensor, Tensor],
        aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, scores.causal,
            no_draws, no_draws, scale=scores.scale,
        ),
    )  # fmt: skip


EFFICIENT_ROWS = 32
"""The memory-efficient kernel keeps lse in rows of a multiple of this."""
EFFICIENT_BIAS = 16
"""The memory-efficient kernel reads a bias whose rows lie a multiple of this apart."""


def _efficient_bias(q: Tensor, k: Tensor, scores: Scores) -> Tensor | None:
    bias, keys = _bias(scores, q.dtype), k.shape[2]
    if bias is None:
        return None
    aligned = F.pad(bias, (0, -keys % EFFICIENT_BIAS))[..., :keys]
    return aligned.expand(q.shape[0], q.shape[1], -1, -1)


def _per_head(x: Tensor, q: Tensor) -> Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    out, lse, *_ = aten._scaled_dot_product_efficient_attention(
        q, _per_head(k, q), _per_head(v, q), _efficient_bias(q, k, scores), True, 0.0, scores.causal, scale=scores.scale
    )
    return out, lse[..., : q.shape[2]]


def _efficient_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    rows = F.pad(lse, (0, -lse.shape[-1] % EFFICIENT_ROWS)).contiguous()
    no_draws = torch.zeros((), dtype=torch.int64, device=q.device)
    dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad, q, _per_head(k, q), _per_head(v, q), _efficient_bias(q, k, scores), out, rows, no_draws, no_draws,
        0.0, (True, True, True, False), scores.causal, scale=scores.scale,
    )  # fmt: skip
    return dq, *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


def _weights(q: Tensor, k: Tensor, scores: Scores) -> Tensor:
    """Scores in full, masked: [B, H, Sq, Sk]."""
    square = (q @ _per_head(k, q).transpose(-1, -2)) * scores.scale
    seen = torch.ones_like(square[:1, :1], dtype=torch.bool).tril() if scores.causal else scores.mask
    return square if seen is None else square.masked_fill(~seen, NO_WEIGHT)


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    square = _weights(q, k, scores)
    return square.softmax(-1) @ _per_head(v, q), square.logsumexp(-1)


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> tuple[Tensor, Tensor, Tensor]:
    weights = (_weights(q, k, scores) - lse.unsqueeze(-1)).exp()
    through = grad @ _per_head(v, q).transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)
    dscores = weights * through * scores.scale
    dk, dv = dscores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ grad
    return dscores @ _per_head(k, q), *(x.unflatten(1, (k.shape[1], -1)).sum(2) for x in (dk, dv))


CPU = Kernel(_cpu_forward, _cpu_backward)
"""float64, float32, bfloat16, float16; masks; fewer key heads. Yields shapes on the meta device, too."""
CUDA_FLASH = Kernel(_flash_forward, _flash_backward, head_unit=8)
"""bfloat16 and float16 without a mask; fewer key heads."""
CUDA_EFFICIENT = Kernel(_efficient_forward, _efficient_backward, head_unit=8)
"""float32 and 16-bit types, with a mask as a bias; as many key heads as query heads."""
PLAIN = Kernel(_plain_forward, _plain_backward)
"""Anything, with the whole square of scores: what no fused kernel takes, and the measure of the others in tests."""
