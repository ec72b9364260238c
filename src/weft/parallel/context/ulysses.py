"""Ulysses attention: an all-to-all exchanges heads for columns; each rank attends over whole sequences, with 1/c of the heads."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.attention_mask import ALL_FEATURES
from weft.errors import PlanError
from weft.models.common.attention import FusedAttention
from weft.models.common.attention_spec import AttentionSpec
from weft.models.common.batch import Batch
from weft.parallel.context.documents import in_rank_order, in_sequence_order, whole_documents_of
from weft.parallel.cp import AXIS, repeats_of_shared_heads, uneven_heads

COLUMNS, HEADS = 1, 2
"""Dims of q_BSHK."""


class UlyssesAttention:
    """One device's attention on whole sequences and 1/c of the heads.

        q, k, v: all heads, own columns  -- all_to_all -->  own heads, all columns  -- attend, all_to_all -->  and back

    Where c divides the heads of queries but not those of keys and values, these are repeated until it
    does: each rank gets the ones that its queries read.

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses).
    """

    name = "Ulysses"
    supports = ALL_FEATURES
    alternative = "--parallel.context ring"
    left_out = ("__call__",)

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.inner = FusedAttention()

    def __call__(
        self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch, spec: AttentionSpec
    ) -> Tensor:
        """This rank's columns of q, k and v -> its out_BSHW.

        Raises:
            PlanError: c does not divide the heads of queries.
        """
        degree = self.comm.degree(AXIS)
        if q_BSHK.shape[HEADS] % degree:
            raise PlanError(uneven_heads(degree, f"{q_BSHK.shape[HEADS]} heads"))
        num_repeats = repeats_of_shared_heads(k_BSGK.shape[HEADS], degree)
        q = self._whole_sequences(q_BSHK)
        k = self._whole_sequences(k_BSGK.repeat_interleave(num_repeats, HEADS))
        v = self._whole_sequences(v_BSGW.repeat_interleave(num_repeats, HEADS))
        num_heads = q.shape[HEADS]
        first_head = self.comm.index(AXIS) * num_heads
        # What a specification has for each head (sinks, slopes) is cut to the heads of this rank.
        own_heads = slice(first_head, first_head + num_heads)
        own_spec = spec.select_heads(own_heads)
        whole_batch = batch.of_whole_sequences
        documents = whole_documents_of(batch)
        if documents is not whole_batch.documents:
            whole_batch = replace(batch, documents=documents)
        out = self.inner(q, k, v, whole_batch, own_spec)
        return self._own_columns(out)

    def _whole_sequences(self, x: Tensor) -> Tensor:
        by_rank = ops.all_to_all(x, self.comm, AXIS, HEADS, join_dim=COLUMNS)
        return in_sequence_order(by_rank, self.comm.degree(AXIS))

    def _own_columns(self, x: Tensor) -> Tensor:
        by_rank = in_rank_order(x, self.comm.degree(AXIS))
        return ops.all_to_all(by_rank, self.comm, AXIS, COLUMNS, join_dim=HEADS)
