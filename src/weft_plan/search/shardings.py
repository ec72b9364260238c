"""Groups of layouts with equal sharding, as a search takes them: their bound, and which come first or next."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from weft.parallel.ep import AXIS as EP
from weft.parallel.tp import AXIS as TP
from weft_plan.search.candidates import LayoutGroup
from weft_plan.search.layout_choice import Layout

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
    is_wide = tp * key.degree(EP) > node
    return is_wide, tp, not key.sequence, -key.degree(EP), sharding.rest


def leanness(sharding: Sharding) -> tuple[int, int]:
    """Sorts shardings: those with the fewest activations first."""
    return LEANEST_FIRST.index(sharding.key.recompute), sharding.key.micro_size


def holds_more(key: Layout, other: Layout) -> bool:
    """Whether the layouts of a sharding hold at least the activations of another one's: the same
    but for larger micro-batches. A schedule never has more samples in flight when they come in more
    and smaller micro-batches. Less recomputation holds more only where several layers of a rank are
    in flight, so it is no such reason.
    """
    same_size = replace(other, micro_size=key.micro_size)
    return key == same_size and key.micro_size >= other.micro_size


def num_differences(first: Layout, second: Layout) -> int:
    """Options in which two shardings differ."""
    names = ("degrees", "recompute", "sequence", "context", "micro_size")
    return sum(getattr(first, name) != getattr(second, name) for name in names)


def neighbours(best: Layout, waiting: Iterable[Sharding]) -> list[Sharding]:
    """The sharding of the best layout, and those that differ from it in one option, not in the
    degrees; first those with the nearest micro-batch, of these the ones with the least bound.
    """
    key = best.sharding

    def nearest_first(sharding: Sharding) -> tuple[bool, float, Sharding]:
        ratio = sharding.key.micro_size / key.micro_size
        return num_differences(sharding.key, key) > 0, abs(math.log(ratio)), sharding

    found: list[Sharding] = []
    for sharding in waiting:
        has_its_degrees = sharding.key.degrees == key.degrees
        if has_its_degrees and num_differences(sharding.key, key) <= 1:
            found.append(sharding)
    return sorted(found, key=nearest_first)
