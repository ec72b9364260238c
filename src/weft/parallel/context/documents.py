"""Documents of whole packed sequences, where each rank holds some columns, and their ranges per chunk."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm.comm import Comm
from weft.core.mesh import Axis
from weft.core.sequence import DocumentRange, zigzag
from weft.errors import Fault, PlanError
from weft.models.common.batch import Batch

OWN_DOCUMENTS = "are other ones than those of the batch: under cp a rank sees its columns alone"
DOCUMENTS_OF_BATCH = "attend with the batch as it is (--data.packing documents gives its documents), or a mesh without cp"


def gather_documents(own_BS: Tensor, comm: Comm, axis: Axis) -> Tensor:
    """documents_BT of whole sequences from those of each rank's columns: a small all-gather."""
    by_rank = comm.all_gather(own_BS, axis, dim=1)
    return in_sequence_order(by_rank, comm.degree(axis))


def whole_documents_of(batch: Batch) -> Tensor | None:
    """documents_BT of the whole sequences of which a rank holds columns; None: without documents.

    Raises:
        PlanError: the batch has documents of its columns alone: numbers that a model counts itself
            begin anew on each rank.
    """
    if batch.documents is None:
        return None
    if batch.whole_documents is None:
        raise PlanError(Fault("documents", OWN_DOCUMENTS, fix=DOCUMENTS_OF_BATCH))
    return batch.whole_documents


def in_sequence_order(by_rank: Tensor, num_ranks: int) -> Tensor:
    """Columns (dim 1) rank after rank -> columns as the sequence has them."""
    if num_ranks == 1:
        return by_rank
    numbers = chunk_numbers(num_ranks)
    chunks = by_rank.chunk(len(numbers), 1)
    by_number = dict(zip(numbers, chunks, strict=True))
    in_order = [by_number[number] for number in sorted(by_number)]
    return torch.cat(in_order, 1)


def in_rank_order(whole: Tensor, num_ranks: int) -> Tensor:
    """Columns (dim 1) as the sequence has them -> rank after rank."""
    numbers = chunk_numbers(num_ranks)
    chunks = whole.chunk(len(numbers), 1)
    return torch.cat([chunks[number] for number in numbers], 1)


def chunk_numbers(num_ranks: int) -> list[int]:
    """Numbers of the chunks of a sequence, rank after rank: [0, 3, 1, 2] for two ranks."""
    return [
        chunk.start
        for index in range(num_ranks)
        for chunk in zigzag(2 * num_ranks, num_ranks, index)
    ]


def document_ranges(
    whole_BT: Tensor, num_ranks: int
) -> tuple[tuple[DocumentRange, ...], ...] | None:
    """Smallest and largest document of each chunk of each sequence, [row][chunk]; None on the meta
    device.

    It waits for the device: the numbers decide which blocks are computed.
    """
    if whole_BT.is_meta:
        return None
    num_chunks = 1
    if num_ranks > 1:
        num_chunks = 2 * num_ranks
    by_chunk = whole_BT.unflatten(1, (num_chunks, -1))
    smallest = by_chunk.amin(2).tolist()
    largest = by_chunk.amax(2).tolist()
    ranges: list[tuple[DocumentRange, ...]] = []
    for low, high in zip(smallest, largest, strict=True):
        row = tuple(zip(low, high, strict=True))
        ranges.append(row)
    return tuple(ranges)
