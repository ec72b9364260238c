"""Attention within documents, and within a window, by torch's `varlen_attn`: one launch for all documents of a batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from weft.core.attention_mask import AttentionMask
from weft.models.common.attention_kernels import CUDA_FLASH, pad_head, varlen_with_windows
from weft.models.common.attention_spec import AttentionSpec


class DocumentLengths(NamedTuple):
    """The documents of a batch.

    Attributes:
        borders: columns at which they begin, counted over all sequences, and their number: int32.
        longest: columns of the longest one.
    """

    borders: Tensor
    longest: int


def varlen_attention(
    q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, documents: DocumentLengths, spec: AttentionSpec
) -> Tensor:
    """Causal or bidirectional attention, with a window or without -> out_BSHW; differentiable."""
    varlen_attn = varlen_with_windows()
    assert varlen_attn is not None, "chosen where this torch has it"
    rows, length, heads, _ = q_BSHK.shape
    width = v_BSGW.shape[-1]
    unit = CUDA_FLASH.head_unit
    size = -(-max(q_BSHK.shape[-1], width) // unit) * unit
    q, k, v = (pad_head(x, size).flatten(0, 1) for x in (q_BSHK, k_BSGK, v_BSGW))
    borders, longest = documents
    out: Tensor = varlen_attn(
        q,
        k,
        v,
        borders,
        borders,
        longest,
        longest,
        scale=spec.scale_of(q_BSHK),
        window_size=window_size(spec.mask),
        enable_gqa=k_BSGK.shape[2] != heads,
    )
    by_row: Tensor = out.unflatten(0, (rows, length))
    return by_row[..., :width]


def window_size(mask: AttentionMask) -> tuple[int, int]:
    """Keys that a query sees before and after itself; -1: all.

    >>> window_size(AttentionMask(window=256)), window_size(AttentionMask(causal=False))
    ((255, 0), (-1, -1))
    """
    reach = -1 if mask.window is None else mask.window - 1
    return reach, 0 if mask.causal else reach
