"""Groups of layouts with equal sharding, as a search takes them: their bound, and which come first."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from weft.parallel.ep import AXIS as EP
from weft.parallel.tp import AXIS as TP
from weft.planner.search.candidates import LayoutGroup, PipelineChoice
from weft.planner.search.layout_choice import Layout

LEANEST_FIRST = ("full", "selective", "none")


@dataclass(order=True)
class Sharding:
    """Groups of layouts with equal sharding, by a lower bound of the objective.

    Attributes:
        rest: decides between equal bounds.
        key: the sharding, as a layout on one pipeline and data rank.
        groups: with the ZeRO stages whose states fit.
    """

    bound: float
    rest: tuple[int, ...]
    key: Layout = field(compare=False)
    groups: list[tuple[LayoutGroup, tuple[int, ...]]] = field(compare=False)

    def __len__(self) -> int:
        return sum(len(group.pipelines) * len(zeros) for group, zeros in self.groups)


def plausibility(sharding: Sharding, node: int) -> tuple[object, ...]:
    """Sorts shardings: those that are bounded first.

    Args:
        node: devices of one node.
    """
    key = sharding.key
    tp = key.degree(TP)
    is_wide = tp > node
    return is_wide, tp, not key.sequence, -key.degree(EP), sharding.rest


def leanness(sharding: Sharding) -> tuple[int, int]:
    """Sorts shardings: those with the fewest activations first."""
    return LEANEST_FIRST.index(sharding.key.recompute), sharding.key.micro_size


def layout_of(group: LayoutGroup, pipeline: PipelineChoice, zero: int) -> Layout:
    """The layout of a group with this schedule and ZeRO stage."""
    return replace(
        group.base,
        zero=zero,
        schedule=pipeline.schedule,
        chunks=pipeline.chunks,
        split=pipeline.split,
    )
