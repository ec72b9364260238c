"""Where the documents of packed sequences begin and end, read once for each batch."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from weft.core.query_blocks import RowRuns
from weft.models.common.dropout import has_no_memory


def document_runs(documents_BS: Tensor) -> tuple[RowRuns, ...]:
    """The documents of each sequence. Where tensors have no values (on the meta device) each
    sequence is one document, for which attention computes and holds most.

    On a GPU the host waits for the device once: the lengths decide which kernels are launched.
    """
    num_rows, length = documents_BS.shape
    if has_no_memory(documents_BS):
        return ((range(length),),) * num_rows
    # one copy for all rows: each `tolist` of a row on a GPU would wait for the device
    numbers_BS = documents_BS.detach().cpu()
    is_border_BS = numbers_BS[:, 1:] != numbers_BS[:, :-1]
    return tuple(map(_row_runs, numbers_BS, is_border_BS))


def _row_runs(numbers_S: Tensor, is_border_S: Tensor) -> RowRuns:
    borders = (is_border_S.nonzero().flatten() + 1).tolist()
    starts = [0, *borders]
    numbers = numbers_S[torch.tensor(starts)].tolist()
    # a document that comes back after another one is no run of columns
    if len(set(numbers)) < len(numbers):
        return None
    stops = [*starts, len(numbers_S)]
    return tuple(range(start, stop) for start, stop in pairwise(stops))
