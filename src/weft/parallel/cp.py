"""Context parallelism as a dimension: each sequence is sharded along its length. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.core.dimension import Dimension, LayoutOptions, LayoutRequest
from weft.errors import Fault

AXIS = "cp"
HEADS = "heads"
WITHOUT_HEADS = (("parallel.context", "ring"), ("parallel.context", "allgather"))
"""Ways that shard no heads."""
TRAFFIC = {
    "ring": "keys and values around a ring, overlapped with attention",
    "allgather": "all-gather of keys and values, in forward and backward",
    "ulysses": "all-to-all between positions and heads around each attention",
}


def traffic(options: LayoutOptions) -> str:
    """What attention sends along cp."""
    return TRAFFIC[options.context]


def faults(request: LayoutRequest) -> Iterable[Fault]:
    """Only sequences have positions to shard; Ulysses shards the heads of a rank over cp."""
    degree = request.degrees[AXIS]
    if request.model_kind != "tokens":
        what = f"cp shards sequences, and {request.model_name} reads {request.model_kind}"
        yield Fault("mesh", what, got=f"cp{degree}", need="no cp")
        return
    if request.options.context == "ulysses":
        yield from _head_faults(request)


def _head_faults(request: LayoutRequest) -> Iterable[Fault]:
    degree = request.degrees[AXIS]
    size = request.local_sizes.get(HEADS)
    if size is None or size % degree == 0:
        return
    where = " on each rank" if request.axis_sizes[HEADS] != size else ""
    yield uneven_heads(degree, f"{size} heads{where}")


def uneven_heads(degree: int, got: str) -> Fault:
    """Ranks of cp would have unequally many heads."""
    what = f"ulysses needs heads % cp == 0, and cp{degree} does not divide the heads"
    fix = " or ".join(f"--{key} {value}" for key, value in WITHOUT_HEADS)
    return Fault("parallel.context", what, got=got, need="a multiple of cp", fix=fix)


def repeats_of_shared_heads(num_heads: int, degree: int) -> int:
    """How often Ulysses repeats each head of keys and values, which several heads of queries share,
    so that cp divides them.
    """
    return degree // math.gcd(num_heads, degree)


DIMENSION = Dimension(
    name=AXIS,
    summary="context: each sequence is sharded along its length",
    nesting=4,
    batch="positions",
    traffic=traffic,
    faults=faults,
    alternatives=WITHOUT_HEADS,
    transform="weft.parallel.context.attend:transform",
)
