"""Owns attention by exchange of heads for columns: each rank attends over whole sequences, with its share of the heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.attention_mask import ALL_FEATURES
from weft.core.sequence import zigzag
from weft.models.common.attention import AttentionSpec, FusedAttention
from weft.models.common.batch import Batch
from weft.parallel.context import documents

AXIS = "cp"
COLUMNS, HEADS = 1, 2
"""Dims of q_BSHK."""


class UlyssesAttention:
    """One device's attention on whole sequences and 1/c of the heads.

        q, k, v: all heads, own columns  -- all_to_all -->  own heads, all columns  -- attend, all_to_all -->  and back

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses).
    """

    name = "Ulysses"
    supports = ALL_FEATURES
    alternative = "--parallel.context ring"

    def __init__(self, comm: Comm) -> None:
        self.inner, self.comm = FusedAttention(), comm

    def __call__(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec) -> Tensor:
        """This rank's columns of q, k and v -> its out_BSHW."""
        q, k, v = (self._whole_sequences(x) for x in (q_BSHK, k_BSGK, v_BSGW))
        whole_batch = replace(batch, documents=self._documents(batch))
        heads, first = q.shape[HEADS], self.comm.index(AXIS) * q.shape[HEADS]
        own_spec = spec.select_heads(slice(first, first + heads))
        return self._own_columns(self.inner(q, k, v, whole_batch, own_spec))

    def _whole_sequences(self, x: Tensor) -> Tensor:
        return self._in_sequence(ops.all_to_all(x, self.comm, AXIS, HEADS, join_dim=COLUMNS))

    def _own_columns(self, x: Tensor) -> Tensor:
        chunks = x.chunk(2 * self.comm.degree(AXIS), COLUMNS)
        by_rank = torch.cat([chunks[number] for number in self._held()], COLUMNS)
        return ops.all_to_all(by_rank, self.comm, AXIS, COLUMNS, join_dim=HEADS)

    def _in_sequence(self, by_rank: Tensor) -> Tensor:
        """Columns of all ranks, rank after rank -> columns as the sequence has them."""
        held = self._held()
        chunks = by_rank.chunk(len(held), COLUMNS)
        return torch.cat([chunks[held.index(number)] for number in range(len(held))], COLUMNS)

    def _held(self) -> list[int]:
        """Numbers of the chunks of a sequence, rank after rank: [0, 3, 1, 2] for two ranks."""
        degree = self.comm.degree(AXIS)
        return [span.start for index in range(degree) for span in zigzag(2 * degree, degree, index)]

    def _documents(self, batch: Batch) -> Tensor | None:
        """Of whole sequences."""
        if batch.documents is None or batch.whole_documents is not None:
            return batch.whole_documents
        return self._in_sequence(torch.cat(documents.of_each_rank(batch.documents, self.comm, AXIS), COLUMNS))
