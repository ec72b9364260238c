"""Owns what attention keeps of the tokens it has seen, and the `Attend` seam that reads it. Models stay as they are.

Note [A cell is a position]
    Cell c of a row holds the key and value of the row's token at position c, and a query at position p reads cells 0 to p.
    So prompts of different length stand in one batch: behind a shorter one lie cells that hold nothing of it,

        row 0   a b c d e          positions 0 1 2 3 4 | 5 ...
        row 1   a b c . .          positions 0 1 2 . . | 3 ...

    which none of its queries sees before its own token at that position has overwritten them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.attention_mask import Feature
from weft.models.common.attention import AttentionSpec, FusedAttention, set_implementations
from weft.models.common.batch import IGNORE, Batch

BLOCK = 256
"""Cells that are allocated at once; growth copies what is there."""


@dataclass(frozen=True)
class Look(Batch):
    """New tokens of some rows, and how they see the old ones.

    Attributes:
        start: position of every row's first new token; None where rows differ.
        stop: cells below this are read.
    """

    start: int | None = None
    stop: int = 0

    @property
    def mask(self) -> Tensor | None:
        """Cells that each query reads, [B, 1, S, T]; None where it is all of them."""
        if self.start is not None and self.start + 1 == self.stop:
            return None
        cells_T = torch.arange(self.stop, device=self.positions.device)
        return cells_T <= self.positions[:, None, :, None]


def look_at(tokens_BS: Tensor, firsts: Sequence[int]) -> Look:
    """New tokens, the first of row b at position `firsts[b]`."""
    length = tokens_BS.shape[1]
    starts_B = torch.tensor(firsts, dtype=torch.int64, device=tokens_BS.device)
    positions_BS = starts_B.unsqueeze(1) + torch.arange(length, device=tokens_BS.device)
    ignored_BS = torch.full_like(tokens_BS, IGNORE)
    alike = len(set(firsts)) <= 1
    start, stop = (firsts[0] if alike and firsts else 0 if alike else None), max(firsts, default=0) + length
    return Look(tokens_BS, ignored_BS, positions_BS, start=start, stop=stop)


class Cache:
    """Keys and values of one attention; see Note [A cell is a position]. It grows by whole blocks of cells."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def put(self, k_BSGK: Tensor, v_BSGW: Tensor, look: Look) -> tuple[Tensor, Tensor]:
        """Keep what is new; all cells that are read, keys_BGTK and values_BGTW."""
        self.keys = _put(self.keys, k_BSGK, look)
        self.values = _put(self.values, v_BSGW, look)
        return self.keys[:, :, : look.stop], self.values[:, :, : look.stop]

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows alone, in this order."""
        if self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[rows], self.values[rows]

    def clear(self) -> None:
        """Let go of all."""
        self.keys = self.values = None

    @property
    def num_bytes(self) -> int:
        """Memory that is held."""
        return sum(tensor.nbytes for tensor in (self.keys, self.values) if tensor is not None)


def _put(cells: Tensor | None, new_BSGK: Tensor, look: Look) -> Tensor:
    cells_BGTK = _grown(cells, new_BSGK, look.stop)
    if look.start is not None:
        cells_BGTK[:, :, look.start : look.stop] = new_BSGK.transpose(1, 2)
    else:
        rows_B1 = torch.arange(len(new_BSGK), device=new_BSGK.device).unsqueeze(1)
        cells_BGTK.transpose(1, 2)[rows_B1, look.positions] = new_BSGK
    return cells_BGTK


def _grown(cells: Tensor | None, like_BSGK: Tensor, stop: int) -> Tensor:
    """Cells for `stop` positions at least; what is not written yet is zero, since a masked cell still enters products."""
    if cells is not None and cells.shape[2] >= stop:
        return cells
    batch, _, heads, width = like_BSGK.shape
    grown_BGTK = like_BSGK.new_zeros(batch, heads, -(-stop // BLOCK) * BLOCK, width)
    if cells is not None:
        grown_BGTK[:, :, : cells.shape[2]] = cells
    return grown_BGTK


class CachedAttention:
    """Attention of new tokens to themselves and to the kept keys and values of earlier ones.

    The first look is plain attention. After it a head of keys serves the query heads that share it in one product.
    """

    name = "cached"
    supports: frozenset[Feature] = frozenset(("causal", "documents"))
    alternative = "a causal model"

    def __init__(self) -> None:
        self.cache = Cache()

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
        """As `FusedAttention`, for tokens from `batch.positions` on."""
        assert isinstance(batch, Look), "whoever swapped the seam reads by look_at"
        keys, values = self.cache.put(k_BSGK, v_BSGW, batch)
        if batch.start == 0:
            return FusedAttention()(q_BSHK, k_BSGK, v_BSGW, batch, spec)
        if q_BSHK.shape[1] == 1:
            q_BGRK = q_BSHK.squeeze(1).unflatten(1, (keys.shape[1], -1))
            out_BGRW = F.scaled_dot_product_attention(q_BGRK, keys, values, attn_mask=batch.mask, scale=spec.scale)
            return out_BGRW.flatten(1, 2).unsqueeze(1)
        out_BHSW = F.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2), keys, values, attn_mask=batch.mask, scale=spec.scale, enable_gqa=True
        )
        return out_BHSW.transpose(1, 2)


def remember(stages: Mapping[int, nn.ModuleDict]) -> tuple[Cache, ...]:
    """Let every `Attend` of these stages keep keys and values; the caches, empty."""
    caches: list[Cache] = []
    for number, stage in stages.items():
        made = set_implementations(stage, CachedAttention, name=f"stage {number}")
        caches.extend(implementation.cache for implementation in made)
    return tuple(caches)
