"""What torch.distributed.checkpoint asks of a tensor: the boxes of entries that this rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.core.axes import Box, boxes_of_range
from weft.parallel.zero.shard_entries import ShardEntries


def _boxes(entries: ShardEntries) -> tuple[Box, ...]:
    own = entries.own
    return boxes_of_range(Box.whole(entries.shape), own.start, own.stop)


def chunks(entries: ShardEntries) -> list[Any]:
    """Place and size of each box of this rank's entries."""
    # imported late: it is slow, and needed in scripts that call it alone
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(torch.Size(box.lo), torch.Size(box.shape)) for box in _boxes(entries)
    ]


def write_items(name: str, entries: ShardEntries, local: Tensor) -> list[Any]:
    """What this rank writes of a tensor."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    return [
        WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunk,
                properties=TensorProperties.create_from_tensor(local),
                size=torch.Size(entries.shape),
            ),
        )
        for chunk in chunks(entries)
    ]


def part_at(offset: Sequence[int] | None, entries: ShardEntries, local: Tensor) -> Tensor:
    """The box that begins at `offset`, in the same memory."""
    start = 0
    for box in _boxes(entries):
        if offset is None or tuple(offset) == box.lo:
            return local[start : start + box.size].view(box.shape)
        start += box.size
    raise KeyError(f"no box of this rank begins at {offset}")
