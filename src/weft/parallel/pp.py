"""Pipeline parallelism as a dimension: blocks are split into stages. Imports no torch."""

from __future__ import annotations

from weft.core.dimension import Dimension

AXIS = "pp"

DIMENSION = Dimension(
    name=AXIS,
    summary="pipeline: blocks are split into stages",
    nesting=0,
    shards_blocks=True,
    traffic=lambda options: "activations and their gradients, between neighbours",
)
