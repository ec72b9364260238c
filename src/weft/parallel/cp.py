"""Context parallelism as a dimension: each sequence is sharded along its length. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.dimension import Dimension, LayoutOptions, LayoutRequest
from weft.errors import Fault

AXIS = "cp"
HEAD_AXES = ("heads", "kv_heads")
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
    local_heads = {axis: size for axis, size in request.local_sizes.items() if axis in HEAD_AXES}
    uneven = [axis for axis, size in local_heads.items() if size % degree]
    if not uneven:
        return
    got = ", ".join(f"{size} {axis}" for axis, size in local_heads.items())
    is_sharded = any(request.axis_sizes[axis] != size for axis, size in local_heads.items())
    where = " on each rank" if is_sharded else ""
    yield Fault(
        "parallel.context",
        f"ulysses needs heads % cp == 0, and cp{degree} does not divide {', '.join(uneven)}",
        got=f"{got}{where}",
        need="a multiple of cp",
    )


DIMENSION = Dimension(
    name=AXIS,
    summary="context: each sequence is sharded along its length",
    nesting=4,
    batch="positions",
    traffic=traffic,
    faults=faults,
    alternatives=(("parallel.context", "ring"), ("parallel.context", "allgather")),
    transform="weft.parallel.context.attend:transform",
)
