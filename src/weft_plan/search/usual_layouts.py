"""The layouts that anyone tries first: ep or tp inside a node, few pipeline ranks, data parallelism for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.core.dimension import all_axes
from weft.core.sequence import DEFAULT_CONTEXT
from weft.parallel.cp import AXIS as CP
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.schedule.catalog import DEFAULT_SCHEDULE
from weft_plan.search.candidates import Candidates, LayoutGroup
from weft_plan.search.layout_choice import Layout

MOST_USUAL = 10
PIPELINES = (1, 2, 4, 8)
INSIDE = (2, 4)
"""By which the ranks along tp are fewer than the devices of a node."""
ZEROS = (1, 3)
RECOMPUTES = ("selective", "full")

Degrees = Mapping[str, int]


def usual_layouts(found: Candidates, node: int) -> Iterator[tuple[Layout, ...]]:
    """For each of the usual meshes that are candidates, its layouts with fewer and fewer bytes: with
    higher ZeRO stages, then with more recomputation.

    Args:
        node: devices of one node.
    """
    groups: dict[frozenset[tuple[str, int]], list[LayoutGroup]] = {}
    for group in found.groups:
        if _is_usual(group.base):
            groups.setdefault(_inner_degrees(group.base), []).append(group)
    most_experts = max((group.base.degree(EP) for group in found.groups), default=1)
    num_found = 0
    for pipeline in PIPELINES:
        for inner in _inside_node(node, min(node, most_experts)):
            wanted = {**inner, PP: pipeline}
            key = frozenset((axis, degree) for axis, degree in wanted.items() if degree > 1)
            if key in groups and num_found < MOST_USUAL:
                num_found += 1
                yield tuple(_smaller_and_smaller(groups[key]))


def _is_usual(layout: Layout) -> bool:
    """Whether its axes are in the usual order, and other options are those that go with them."""
    axes = [axis for axis, _ in layout.degrees]
    in_order = [axis for axis in all_axes() if axis in axes]
    has_sequence = layout.sequence == (layout.degree(TP) > 1)
    is_plain = layout.context == DEFAULT_CONTEXT and not layout.has_copies
    return axes == in_order and has_sequence and is_plain


def _inner_degrees(layout: Layout) -> frozenset[tuple[str, int]]:
    return frozenset(item for item in layout.degrees if item[0] in (PP, EP, CP, TP))


def _inside_node(node: int, num_experts: int) -> Iterator[Degrees]:
    """Degrees of ep and tp that fill a node, or a part of it."""
    if num_experts > 1:
        yield {EP: num_experts}
        yield {EP: num_experts // 2, TP: 2}
    else:
        yield {}
    yield {TP: node}
    for part in INSIDE:
        yield {TP: node // part}


def _smaller_and_smaller(groups: list[LayoutGroup]) -> Iterator[Layout]:
    """The layouts of one mesh with the smallest micro-batch, the fastest first."""
    micro_size = min(group.base.micro_size for group in groups)
    smallest = [group for group in groups if group.base.micro_size == micro_size]
    by_recompute = {group.base.recompute: group for group in smallest}
    recomputes = [each for each in RECOMPUTES if each in by_recompute] or list(by_recompute)
    for recompute in recomputes:
        group = by_recompute[recompute]
        plain = [each for each in group.pipelines if each.schedule == DEFAULT_SCHEDULE]
        pipeline = (plain or list(group.pipelines))[0]
        zeros = [zero for zero in ZEROS if zero in group.zeros] or list(group.zeros)
        for zero in zeros:
            yield group.layout(pipeline, zero)
