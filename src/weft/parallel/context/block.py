"""Owns attention of one block of queries to one block of keys: torch's fused kernels that also tell the log-sum-exp.

Note [Blocks add up]
    With scores s = scale q k^T and lse = log sum exp(s) over the keys of a block, the softmax over several blocks is the
    blocks' outputs weighted by exp(lse - global lse). And the gradients of one block, computed with the *global* output and
    lse, are its share of the global gradients: dq, dk and dv of all blocks just add up. Nothing but q, out and lse has to be
    kept, no S x S square ever exists. Source: Dao 2023 (FlashAttention-2); Liu et al. 2023 (ring attention).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.parallel.context import kernels
from weft.parallel.context.kernels import NO_WEIGHT, Kernel, Scores


class Gradients(NamedTuple):
    """Gradients of one block, shaped like q, k and v."""

    q: Tensor
    k: Tensor
    v: Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
    """q_BHSK, k_BGTK, v_BGTW (T keys, G divides H) -> out_BHSW and lse_BHS, float32 at least.

    A query that sees no key has output 0 and lse -inf.
    """
    kernel, width = _kernel(q, scores), v.shape[-1]
    even_q, even_k, even_v = _even(kernel, q, k, v)
    out, lse = kernel.forward(even_q, even_k, even_v, scores)
    out = out[..., :width]
    if scores.mask is not None:  # kernels disagree on rows without a key: 0 and lse 0, or not a number
        blind = ~scores.mask.any(-1)
        out, lse = out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, NO_WEIGHT)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scores: Scores
) -> Gradients:
    """The block's share of the gradients; `out` and `lse` are those over all blocks, `grad` is the gradient of `out`."""
    kernel, width = _kernel(q, scores), v.shape[-1]
    even_q, even_k, even_v, even_out, even_grad = _even(kernel, q, k, v, out, grad)
    dq, dk, dv = kernel.backward(even_grad, even_q, even_k, even_v, even_out, lse, scores)
    return Gradients(dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., :width])


def _even(kernel: Kernel, *tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors with zeros behind each head: fused kernels take one head size for q, k and v (zeros change no score)."""
    widest = max(x.shape[-1] for x in tensors)
    size = -(-widest // kernel.head_unit) * kernel.head_unit
    return tuple(F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors)


def _kernel(q: Tensor, scores: Scores) -> Kernel:
    if not q.is_cuda:
        return kernels.CPU
    if q.dtype == torch.float64:
        return kernels.PLAIN
    return kernels.CUDA_FLASH if q.dtype != torch.float32 and scores.mask is None else kernels.CUDA_EFFICIENT
