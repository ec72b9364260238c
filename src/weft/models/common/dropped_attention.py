"""Attention with dropout on one device: no scores are kept between forward and backward, some queries at a time.

Note [Dropout of attention]
    Fused kernels take no mask of dropout, and autograd would keep three tensors [B, H, S, T] a
    layer. Here the scores of some queries exist at a time; q, k, v, the output and the log-sum-exp
    of each query are kept, and scores and masks computed again in the backward. With weights
    w = softmax(s) and factors f of dropout, out = (w f) v, so for a gradient g of out

        dv = (w f)^T g       dw = f (g v^T)       ds = w (dw - sum(w dw)) = w (dw - g . out)

    as in Dao 2023 (FlashAttention-2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.models.common.dropout import AttentionDraws, has_no_memory

MOST_SCORES = {"cpu": 2**19, "cuda": 2**26}
"""Scores that exist at a time."""
LEAST_QUERIES = 32
"""Of which scores exist at a time: products of fewer are slow."""


@dataclass(frozen=True)
class DroppedScores:
    """How weights are computed from scores.

    Attributes:
        scale: factor of q k^T.
        allowed: True where a query sees a key, broadcastable to [B, H, S, S]; None: all see all,
            or, with `is_triangle`, those before them and themselves.
        draws: by which weights are dropped.
    """

    scale: float
    allowed: Tensor | None
    is_triangle: bool
    draws: AttentionDraws

    def chunks(self, q_BHSK: Tensor) -> Iterator[slice]:
        """Runs of queries."""
        batch_size, num_heads, length, _ = q_BHSK.shape
        num_scores = batch_size * num_heads * length
        most = MOST_SCORES.get(q_BHSK.device.type, num_scores * length)
        at_a_time = max(LEAST_QUERIES, most // max(num_scores, 1))
        for start in range(0, length, at_a_time):
            yield slice(start, min(start + at_a_time, length))

    def keys(self, queries: slice) -> slice:
        """The keys that one of these queries sees."""
        return slice(0, queries.stop) if self.is_triangle else slice(None)

    def scores(self, q_BHQK: Tensor, k_BHTK: Tensor, queries: slice) -> Tensor:
        """Scaled and masked, in float32 at least, of some queries and the keys that they see."""
        wide = torch.promote_types(q_BHQK.dtype, torch.float32)
        found = (q_BHQK @ k_BHTK.transpose(-1, -2)).to(wide) * self.scale
        allowed = self.allowed
        if self.is_triangle:
            columns = torch.arange(queries.stop, device=found.device)
            allowed = columns[queries, None] >= columns
        elif allowed is not None:
            allowed = allowed[..., queries, :]
        return found if allowed is None else found.masked_fill(~allowed, float("-inf"))

    def factors(self, weights: Tensor, queries: slice, *, length: int) -> Tensor:
        """What weights, and their gradients, are multiplied with."""
        if has_no_memory(weights):
            return torch.ones_like(weights)
        columns = torch.arange(length, device=weights.device)
        own, seen = columns[queries], columns[self.keys(queries)]
        return self.draws.factors(own, seen, weights.dtype, length=length)


def dropped_attention(
    q_BHSK: Tensor, k_BGSK: Tensor, v_BGSW: Tensor, scores: DroppedScores
) -> Tensor:
    """Attention of whole sequences with dropout -> out_BHSW; G divides H."""
    out: Tensor = _DroppedAttention.apply(q_BHSK, k_BGSK, v_BGSW, scores)  # type: ignore[no-untyped-call]
    return out


def _by_query_head(x_BGSK: Tensor, q_BHSK: Tensor) -> Tensor:
    group_size = q_BHSK.shape[1] // x_BGSK.shape[1]
    return x_BGSK if group_size == 1 else x_BGSK.repeat_interleave(group_size, dim=1)


def _by_key_head(x_BHSK: Tensor, k_BGSK: Tensor) -> Tensor:
    """Gradients of repeated key heads -> of the heads themselves."""
    grouped: Tensor = x_BHSK.unflatten(1, (k_BGSK.shape[1], -1))
    return grouped.sum(2).to(k_BGSK.dtype)


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scores: DroppedScores) -> Tensor:
        wide_k, wide_v = _by_query_head(k, q), _by_query_head(v, q)
        length = q.shape[2]
        outs: list[Tensor] = []
        lses: list[Tensor] = []
        for queries in scores.chunks(q):
            keys = scores.keys(queries)
            found = scores.scores(q[:, :, queries], wide_k[:, :, keys], queries)
            weights = found.softmax(-1)
            dropped = weights * scores.factors(weights, queries, length=length)
            outs.append(dropped.to(v.dtype) @ wide_v[:, :, keys])
            lses.append(found.logsumexp(-1))
        out = torch.cat(outs, 2)
        ctx.save_for_backward(q, k, v, out, torch.cat(lses, 2))
        ctx.scores = scores
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        scores: DroppedScores = ctx.scores
        wide = lse.dtype
        wide_k, wide_v = _by_query_head(k, q), _by_query_head(v, q)
        dq = torch.empty_like(q)
        dk, dv = torch.zeros_like(wide_k, dtype=wide), torch.zeros_like(wide_v, dtype=wide)
        length = q.shape[2]
        for queries in scores.chunks(q):
            keys = scores.keys(queries)
            own_q, own_grad = q[:, :, queries], grad[:, :, queries]
            found = scores.scores(own_q, wide_k[:, :, keys], queries)
            weights = torch.exp(found - lse[:, :, queries, None])
            factors = scores.factors(weights, queries, length=length)
            dropped = (weights * factors).to(q.dtype)
            dv[:, :, keys] += dropped.transpose(-1, -2) @ own_grad
            dweights = (own_grad @ wide_v[:, :, keys].transpose(-1, -2)).to(wide)
            mean = (own_grad.to(wide) * out[:, :, queries]).sum(-1, keepdim=True)
            dscores = (weights * (dweights * factors - mean) * scores.scale).to(q.dtype)
            dq[:, :, queries] = dscores @ wide_k[:, :, keys]
            dk[:, :, keys] += dscores.transpose(-1, -2) @ own_q
        return dq, _by_key_head(dk, k), _by_key_head(dv, v), None
