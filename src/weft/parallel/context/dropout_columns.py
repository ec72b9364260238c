"""Which dims of the tensors of dropout count positions: those that grow with the length of sequences."""

from __future__ import annotations

from weft.core.entry_places import DimShard
from weft.errors import Fault, PlanError
from weft.models.common.dropout_mode import CallShards
from weft.parallel.model.chain import PlainChain
from weft.parallel.model.dropout_blocks import call_shapes, check_calls


def column_shards(chain: PlainChain) -> dict[str, tuple[CallShards, ...]]:
    """Name of a block -> its calls, with the dims that count positions.

    Args:
        chain: of all blocks; its batch has the columns that one context-parallel rank holds.

    Raises:
        PlanError: a dim counts positions and something else.
    """
    batch = chain.batch
    length = batch.inputs.shape[1]
    short_length = length // 2
    long = call_shapes(chain.blocks, batch)
    short = call_shapes(chain.blocks, batch.window(slice(0, short_length)))
    found: dict[str, tuple[CallShards, ...]] = {}
    for name, shapes in long.items():
        check_calls(name, shapes, short[name])
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
