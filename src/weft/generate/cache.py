"""Key-value cache of generation: cached attention behind the `Attend` seam, and rotary angles shared by all layers.

Note [A cell is a position]
    Cell c of a row holds the key and value of the row's token at position c, and a query at
    position p reads cells 0 to p (with a window of w the cells p-w+1 to p). So prompts of different
    length stand in one batch: behind a shorter one lie cells of padding,

        row 0   a b c d e          positions 0 1 2 3 4 | 5 ...
        row 1   a b c . .          positions 0 1 2 . . | 3 ...

    which no query of the row sees before the row's own token at that position has overwritten them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.attention_choice import MOST_SCORE_BYTES
from weft.core.attention_mask import AttentionMask, Feature
from weft.models.common.attention import (
    Attend,
    FusedAttention,
    eager_attention,
    set_implementations,
)
from weft.models.common.attention_spec import AttentionSpec, visible_keys
from weft.models.common.batch import IGNORE, Batch
from weft.models.common.head_output import LOGITS, HeadOutput, heads_of, set_head_output
from weft.parallel.model.dropout_blocks import without_dropout

BLOCK = 256
"""Cells that are allocated at once; growth copies what is there."""


@dataclass(frozen=True)
class DecodeBatch(Batch):
    """New tokens of some rows, and where they stand.

    Attributes:
        cells: cells_BS int64, position of each new token in its row, beyond `max_positions` too.
        first_positions: position of each row's first new token.
    """

    is_never_sharded = True

    cells: Tensor | None = None
    first_positions: tuple[int, ...] = ()

    @property
    def start(self) -> int | None:
        """Position of every row's first new token; None where rows differ."""
        distinct = set(self.first_positions)
        if len(distinct) > 1:
            return None
        return distinct.pop() if distinct else 0

    @property
    def stop(self) -> int:
        """Cells below this are read."""
        return max(self.first_positions, default=0) + int(self.inputs.shape[1])

    def first_cell(self, mask: AttentionMask) -> int:
        """Cells below this are hidden from every new token."""
        if mask.window is None:
            return 0
        first_position = min(self.first_positions, default=0)
        return max(0, first_position - mask.window + 1)

    def visible_cells(self, mask: AttentionMask) -> Tensor | None:
        """Which of the cells from `first_cell` on each query reads, [B, 1, S, T]; None: all of
        them.
        """
        if self.start is not None and self.start + 1 == self.stop:
            return None
        assert self.cells is not None, "made by decode_batch"
        cells_T = torch.arange(self.first_cell(mask), self.stop, device=self.cells.device)
        allowed_BST = visible_keys(mask, self.cells, cells_T)
        if allowed_BST is None:
            return None
        return allowed_BST.unsqueeze(1)


def decode_batch(
    tokens_BS: Tensor, first_positions: Sequence[int], *, max_positions: int | None = None
) -> DecodeBatch:
    """New tokens, the first of row b at position `first_positions[b]`.

    Args:
        max_positions: positions that the model has learned; padding behind them takes the last one.
            None: any number.
    """
    length = tokens_BS.shape[1]
    starts_B = torch.tensor(first_positions, dtype=torch.int64, device=tokens_BS.device)
    cells_BS = starts_B.unsqueeze(1) + torch.arange(length, device=tokens_BS.device)
    positions_BS = cells_BS
    if max_positions is not None:
        positions_BS = cells_BS.clamp(max=max_positions - 1)
    return DecodeBatch(
        inputs=tokens_BS,
        targets=torch.full_like(tokens_BS, IGNORE),
        positions=positions_BS,
        cells=cells_BS,
        first_positions=tuple(first_positions),
    )


class KVCache:
    """Keys and values of one attention; see Note [A cell is a position]. It grows by whole blocks
    of cells.
    """

    def __init__(self) -> None:
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def put(self, k_BSGK: Tensor, v_BSGW: Tensor, batch: DecodeBatch) -> tuple[Tensor, Tensor]:
        """Store what is new; all cells up to the newest, keys_BGTK and values_BGTW."""
        self.keys = _put(self.keys, k_BSGK, batch)
        self.values = _put(self.values, v_BSGW, batch)
        return self.keys[:, :, : batch.stop], self.values[:, :, : batch.stop]

    def keep_rows(self, rows: Tensor) -> None:
        """Keep these rows alone, in this order."""
        if self.keys is None or self.values is None:
            return
        # in new memory, as small as what is kept
        self.keys = self.keys[rows]
        self.values = self.values[rows]

    def clear(self) -> None:
        """Release all memory."""
        self.keys = None
        self.values = None

    @property
    def num_bytes(self) -> int:
        """Memory of all cells."""
        stored = [tensor for tensor in (self.keys, self.values) if tensor is not None]
        return sum(tensor.nbytes for tensor in stored)


def _put(cells_BGTK: Tensor | None, new_BSGK: Tensor, batch: DecodeBatch) -> Tensor:
    grown_BGTK = _grow(cells_BGTK, new_BSGK, batch.stop)
    if batch.start is not None:
        # all rows stand at one position: a slice, which costs a fraction of the indices below
        grown_BGTK[:, :, batch.start : batch.stop] = new_BSGK.transpose(1, 2)
        return grown_BGTK
    assert batch.cells is not None, "made by decode_batch"
    rows_B1 = torch.arange(len(new_BSGK), device=new_BSGK.device).unsqueeze(1)
    # a view: the assignment writes into the cache
    by_cell_BTGK = grown_BGTK.transpose(1, 2)
    by_cell_BTGK[rows_B1, batch.cells] = new_BSGK
    return grown_BGTK


def _grow(cells_BGTK: Tensor | None, like_BSGK: Tensor, stop: int) -> Tensor:
    """Cells for `stop` positions at least; what is not written yet is zero, since a masked cell
    still enters products.
    """
    num_positions = 0
    if cells_BGTK is not None:
        num_positions = cells_BGTK.shape[2]
        if num_positions >= stop:
            return cells_BGTK
    batch_size, _, heads, width = like_BSGK.shape
    num_blocks = -(-stop // BLOCK)
    grown_BGTK = like_BSGK.new_zeros(batch_size, heads, num_blocks * BLOCK, width)
    if cells_BGTK is not None:
        grown_BGTK[:, :, :num_positions] = cells_BGTK
    return grown_BGTK


class CachedAttention:
    """Attention of new tokens to themselves and to the cached keys and values of earlier ones.

    The first read is plain attention. After it a head of keys serves the query heads that share it
    in one product.
    """

    name = "cached"
    supports: frozenset[Feature] = frozenset(
        ("causal", "window", "documents", "softcap", "sinks", "head_bias", "dropout")
    )
    alternative = "a causal mask without a prefix: tokens are generated from left to right"

    def __init__(self) -> None:
        self.cache = KVCache()

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """Attention as in `FusedAttention`, for tokens from `batch.first_positions` on."""
        assert isinstance(batch, DecodeBatch), "cached attention reads batches of decode_batch"
        keys_BGTK, values_BGTW = self.cache.put(k_BSGK, v_BSGW, batch)
        # nothing was read before, so the cells hold what is passed here, and the fused kernel may skip the mask
        if batch.start == 0:
            return FusedAttention()(q_BSHK, k_BSGK, v_BSGW, batch, spec)
        first_cell = batch.first_cell(spec.mask)
        keys_BGTK = keys_BGTK[:, :, first_cell:]
        values_BGTW = values_BGTW[:, :, first_cell:]
        rows, num_new, heads, _ = q_BSHK.shape
        scores_a_query = rows * heads * keys_BGTK.shape[2]
        most = max(1, MOST_SCORE_BYTES // (4 * scores_a_query))
        # scores of a long prompt behind a long cache are as large as both lengths together: in parts they stay bounded
        if num_new <= most:
            return self._read(q_BSHK, keys_BGTK, values_BGTW, batch, spec)
        assert batch.cells is not None, "made by decode_batch"
        parts = zip(q_BSHK.split(most, 1), batch.cells.split(most, 1), strict=True)
        return torch.cat(
            [
                self._read(q, keys_BGTK, values_BGTW, replace(batch, cells=cells), spec)
                for q, cells in parts
            ],
            dim=1,
        )

    def _read(
        self,
        q_BSHK: Tensor,
        keys_BGTK: Tensor,
        values_BGTW: Tensor,
        batch: DecodeBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """The cells that the queries at `batch.cells` see."""
        allowed = batch.visible_cells(spec.mask)
        if not spec.fits_fused_kernel:
            return self._eager(q_BSHK, keys_BGTK, values_BGTW, batch, spec)
        if q_BSHK.shape[1] == 1:
            # the query heads of a group of keys stand where positions would: no copy of the keys for each of them
            q_BGRK = q_BSHK.squeeze(1).unflatten(1, (keys_BGTK.shape[1], -1))
            out_BGRW = F.scaled_dot_product_attention(
                q_BGRK, keys_BGTK, values_BGTW, attn_mask=allowed, scale=spec.scale
            )
            return out_BGRW.flatten(1, 2).unsqueeze(1)
        out_BHSW = F.scaled_dot_product_attention(
            q_BSHK.transpose(1, 2),
            keys_BGTK,
            values_BGTW,
            attn_mask=allowed,
            scale=spec.scale,
            enable_gqa=True,
        )
        return out_BHSW.transpose(1, 2)

    def _eager(
        self,
        q_BSHK: Tensor,
        keys_BGTK: Tensor,
        values_BGTW: Tensor,
        batch: DecodeBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        """Soft-cap, sinks and bias: no fused kernel computes them."""
        assert batch.cells is not None, "made by decode_batch"
        cells_T = torch.arange(batch.first_cell(spec.mask), batch.stop, device=batch.cells.device)
        distance_BST = batch.cells[:, :, None] - cells_T
        out_BHSW = eager_attention(
            q_BSHK.transpose(1, 2),
            keys_BGTK,
            values_BGTW,
            spec,
            allowed=batch.visible_cells(spec.mask),
            distance=distance_BST.unsqueeze(1),
        )
        return out_BHSW.transpose(1, 2)


def install_kv_cache(stages: Mapping[int, nn.ModuleDict]) -> tuple[KVCache, ...]:
    """Let every `Attend` of these stages compute with a cache; the caches, empty.

    Raises:
        PlanError: an attention that is not causal, or that does not declare what it requires.
    """
    caches: list[KVCache] = []
    for stage in stages.values():
        for name, block in stage.items():
            # the block of the model itself: the one around it draws, and generation draws nothing
            inner = without_dropout(block)
            caches.extend(
                implementation.cache
                for implementation in set_implementations(inner, CachedAttention, name=name)
            )
    return tuple(caches)


def attend_without_cache(stages: Mapping[int, nn.ModuleDict]) -> tuple[KVCache, ...]:
    """Let every `Attend` of these stages compute on whole sequences of this rank; no caches."""
    for stage in stages.values():
        for name, block in stage.items():
            set_implementations(without_dropout(block), FusedAttention, name=name)
    return ()


@contextmanager
def restored_modules(stages: Mapping[int, nn.ModuleDict]) -> Iterator[None]:
    """Around generation with a model that trains on: its modules, and the implementations of their
    attention, are then those of before.
    """
    modules = [dict(stage.named_modules(remove_duplicate=False)) for stage in stages.values()]
    attends = [each for found in modules for each in found.values() if isinstance(each, Attend)]
    heads = [head for stage in stages.values() for head in heads_of(stage)]
    outputs = [head.head_output for head in heads]
    implementations = [attend.implementation for attend in attends]
    try:
        yield
    finally:
        for stage, found in zip(stages.values(), modules, strict=True):
            for path, module in found.items():  # parents before what they hold
                # wherever another module stands by now: what generation has installed is left to the collector
                if path and stage.get_submodule(path) is not module:
                    stage.set_submodule(path, module)
        for attend, implementation in zip(attends, implementations, strict=True):
            attend.implementation = implementation
        for head, output in zip(heads, outputs, strict=True):
            set_head_output(head, cast(HeadOutput, output))


def compute_logits(stages: Mapping[int, nn.ModuleDict]) -> None:
    """Let heads hand on logits, also those of a model that trains with losses of tokens."""
    for stage in stages.values():
        for head in heads_of(stage):
            set_head_output(head, LOGITS)
