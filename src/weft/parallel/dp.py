"""Data parallelism as a dimension: ranks read different sequences; ZeRO shards states over it. Imports no torch."""

from __future__ import annotations

from weft.core.dimension import Dimension

AXIS = "dp"

DIMENSION = Dimension(
    name=AXIS,
    summary="data: sequences are sharded",
    nesting=1,
    batch="sequences",
    traffic=lambda options: "gradient reductions, overlapped with the backward",
)
