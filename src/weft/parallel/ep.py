"""Expert parallelism as a dimension: ranks read different sequences and hold different experts. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable

from weft.core.dimension import Dimension, LayoutRequest
from weft.errors import Fault

AXIS = "ep"
EXPERTS = "experts"


def faults(request: LayoutRequest) -> Iterable[Fault]:
    """A model without experts has nothing to shard over ep."""
    if EXPERTS in request.axis_sizes:
        return
    degree = request.degrees[AXIS]
    yield Fault(
        "mesh",
        f"ep{degree} shards experts, and {request.model_name} has none",
        got=f"ep{degree}",
        need="a mixture of experts such as deepseek",
        fix=f"dp{degree} instead",
    )


DIMENSION = Dimension(
    name=AXIS,
    summary="expert: sequences and experts are sharded",
    nesting=3,
    params=(EXPERTS,),
    batch="sequences",
    traffic=lambda options: "all-to-all: tokens to their experts and back",
    faults=faults,
    transform="weft.parallel.expert.dispatch:transform",
)
