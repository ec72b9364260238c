"""Tensor parallelism as a dimension: heads, feed-forward and vocabulary are sharded. Imports no torch."""

from __future__ import annotations

from weft.core.dimension import Dimension, LayoutOptions

AXIS = "tp"


def traffic(options: LayoutOptions) -> str:
    """What each layer sends along tp."""
    if options.sequence_parallel and options.tp_overlap:
        return "parts of the sequence around a ring, beside the products of others: keep in a node"
    if options.sequence_parallel:
        return "all-gathers and reduce-scatters in each layer: keep it inside a node"
    return "two all-reduces per layer in forward and in backward: keep in one node"


DIMENSION = Dimension(
    name=AXIS,
    summary="tensor: heads, feed-forward and vocabulary are sharded",
    nesting=5,
    params=("heads", "kv_heads", "ffn", "vocab"),
    uneven=("vocab",),
    whole_if_uneven=("kv_heads",),  # each rank's heads of queries read those that they share
    shards_activations=True,
    traffic=traffic,
    transform="weft.parallel.tensor.transform:transform",
)
