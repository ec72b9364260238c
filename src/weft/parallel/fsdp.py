"""Sharded data parallelism as a dimension: ZeRO shards states over it, and `dp` outside of it has copies. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.dimension import Dimension, LayoutRequest
from weft.errors import Fault

AXIS = "fsdp"


def faults(request: LayoutRequest) -> Iterable[Fault]:
    """It is a data axis over which states are sharded, so a layout without ZeRO has no use for it."""
    if request.options.zero == 0:
        degree = request.degrees[AXIS]
        yield Fault(
            "parallel.zero",
            "is 0, and states are sharded over the axis fsdp",
            got=f"fsdp{degree}",
            need="1, 2 or 3",
            fix=f"--parallel.zero 3, or dp{degree} in place of fsdp{degree}",
        )


DIMENSION = Dimension(
    name=AXIS,
    summary="sharded data: sequences are sharded, and states by ZeRO",
    nesting=2,
    batch="sequences",
    shards_states=True,
    traffic=lambda options: "gradient reductions and all-gathers of parameters, overlapped",
    faults=faults,
    alternatives=(("parallel.zero", "3"),),
)
