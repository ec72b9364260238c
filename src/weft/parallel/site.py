"""Training sites as a dimension: replicas train apart, an outer optimizer joins them every few steps. Imports no torch."""

from __future__ import annotations

from weft.core.dimension import Dimension

AXIS = "site"

DIMENSION = Dimension(
    name=AXIS,
    summary="site: local updates, joined by an outer step every site.every steps",
    nesting=-1,
    batch="sequences",
    local_updates=True,
    traffic=lambda options: "outer gradients every site.every steps, one row a step",
)
