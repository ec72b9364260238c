"""Which dims of the tensors of drop-out count positions: those that grow with the length of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from weft.core.entry_places import DimShard
from weft.errors import Fault, PlanError
from weft.models.common.batch import Batch, activation_of
from weft.models.common.dropout_mode import CallShards
from weft.models.runs_without_memory import run_without_memory
from weft.parallel.model.dropout_blocks import NotedDropout

CallShapes = dict[str, list[tuple[int, ...]]]


def column_shards(
    blocks: Mapping[str, nn.Module], batch: Batch
) -> dict[str, tuple[CallShards, ...]]:
    """Name of a block -> its calls, with the dims that count positions.

    Args:
        blocks: the whole plain chain, on the meta device.
        batch: of the columns that one context-parallel rank holds.

    Raises:
        PlanError: a dim counts positions and something else.
    """
    length = batch.inputs.shape[1]
    short_length = length // 2
    long = run_without_memory(_shapes, dict(blocks), batch)
    short = run_without_memory(_shapes, dict(blocks), batch.window(slice(0, short_length)))
    found: dict[str, tuple[CallShards, ...]] = {}
    for name, shapes in long.items():
        if len(shapes) != len(short[name]):
            what = "drops out in other calls where its length differs"
            raise PlanError(Fault(name, what, fix="a forward without branches"))
        found[name] = tuple(
            tuple(
                _shard(name, place, sizes, lengths=(length, short_length), rows=len(batch.inputs))
                for place, sizes in enumerate(zip(long_shape, short_shape, strict=True))
            )
            for long_shape, short_shape in zip(shapes, short[name], strict=True)
        )
    return found


def _shard(
    name: str, place: int, sizes: tuple[int, int], *, lengths: tuple[int, int], rows: int
) -> DimShard:
    """How a dim is sharded that has these sizes where sequences have these lengths."""
    if sizes[0] == sizes[1]:
        return DimShard()
    num_sequences = rows if place == 0 else 1
    if sizes != tuple(num_sequences * length for length in lengths):
        what = f"drops out a tensor whose dim {place} counts positions together with others"
        need = "positions as a dim of their own"
        raise PlanError(Fault(name, what, got=f"{sizes[0]} entries", need=need))
    return DimShard(columns=True)


def _shapes(blocks: Mapping[str, nn.Module], batch: Batch) -> CallShapes:
    """The shape of the tensor of each call."""
    found: CallShapes = {}
    x: Any = batch.inputs
    for name, block in blocks.items():
        shapes = found.setdefault(name, [])

        def note(tensor: Tensor, shapes: list[tuple[int, ...]] = shapes) -> None:
            shapes.append(tuple(tensor.shape))

        with torch.no_grad(), NotedDropout(name, note):
            x = activation_of(block(x, batch))
    return found
