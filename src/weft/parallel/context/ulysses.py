"""Owns attention by exchange of heads for columns: each rank attends over whole sequences, with its share of the heads."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from weft.comm import ops
from weft.comm.comm import Comm
from weft.core.sequence import zigzag
from weft.models.batch import Batch
from weft.parallel.context import documents

AXIS = "cp"
COLUMNS, HEADS = 1, 2
"""Dims of q_BSHK."""


class UlyssesAttend(nn.Module):
    """The seam `inner`, whatever it computes, on whole sequences and 1/c of the heads.

        q, k, v: all heads, own columns  -- all_to_all -->  own heads, all columns  -- attend, all_to_all -->  and back

    Source: Jacobs et al. 2023 (DeepSpeed-Ulysses).
    """

    def __init__(self, inner: nn.Module, comm: Comm) -> None:
        super().__init__()
        self.inner, self.comm = inner, comm

    def forward(self, q_BSHK: Tensor, k_BSGK: Tensor, v_BSGW: Tensor, batch: Batch) -> Tensor:
        """This rank's columns of q, k and v -> its out_BSHW."""
        q, k, v = (self._whole_sequences(x) for x in (q_BSHK, k_BSGK, v_BSGW))
        out_BSHW: Tensor = self.inner(q, k, v, replace(batch, documents=self._documents(batch)))
        return self._own_columns(out_BSHW)

    def _whole_sequences(self, x: Tensor) -> Tensor:
        columns = ops.all_to_all(x, self.comm, AXIS, HEADS, join_dim=COLUMNS)
        return columns[:, self._places(columns).argsort()]

    def _own_columns(self, x: Tensor) -> Tensor:
        return ops.all_to_all(x[:, self._places(x)], self.comm, AXIS, COLUMNS, join_dim=HEADS)

    def _places(self, x: Tensor) -> Tensor:
        """Columns of whole sequences, in the order in which the ranks hold them."""
        length, degree = x.shape[COLUMNS], self.comm.degree(AXIS)
        spans = (span for index in range(degree) for span in zigzag(length, degree, index))
        return torch.cat([torch.arange(span.start, span.stop, device=x.device) for span in spans])

    def _documents(self, batch: Batch) -> Tensor | None:
        """Of whole sequences."""
        if batch.documents is None or batch.whole_documents is not None:
            return batch.whole_documents
        columns = torch.cat(documents.of_each_rank(batch.documents, self.comm, AXIS), dim=1)
        return columns[:, self._places(columns).argsort()]
