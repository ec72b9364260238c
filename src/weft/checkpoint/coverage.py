"""Coverage check: boxes must cover a tensor exactly, without a gap or an overlap. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from weft.core.axes import Box


@dataclass(frozen=True)
class CoverageFlaw:
    """Entries of a tensor that no box covers (a gap) or that several boxes cover (an overlap)."""

    kind: Literal["gap", "overlap"]
    box: Box

    def __str__(self) -> str:
        ranges = [f"{lo}:{hi}" for lo, hi in zip(self.box.lo, self.box.hi, strict=True)]
        entries = f"[{', '.join(ranges)}]"
        where = "no piece" if self.kind == "gap" else "more than one piece"
        return f"entries {entries} are in {where}"


def coverage_flaw(whole: Box, boxes: Sequence[Box]) -> CoverageFlaw | None:
    """The first gap or overlap of `boxes` (parts of `whole`); None if each entry of `whole` is in
    exactly one box.

    Sweeps over the first dim: between two neighbouring bounds the set of active boxes does not
    change, and the remaining dims are the same problem with one dim less.
    """
    if whole.size == 0:
        return None
    boxes = [box for box in boxes if box.size]
    if len(boxes) == 1 and boxes[0] == whole:
        return None
    if not whole.lo:
        return _scalar_flaw(whole, len(boxes))
    remaining_dims = Box(whole.lo[1:], whole.hi[1:])
    not_started = sorted(boxes, key=lambda box: -box.lo[0])
    active: list[Box] = []
    for lo, hi in pairwise(_bounds(whole, boxes)):
        while not_started and not_started[-1].lo[0] == lo:
            active.append(not_started.pop())
        active = [box for box in active if box.hi[0] > lo]
        slices = [Box(box.lo[1:], box.hi[1:]) for box in active]
        flaw = coverage_flaw(remaining_dims, slices)
        if flaw is not None:
            box = Box((lo, *flaw.box.lo), (hi, *flaw.box.hi))
            return CoverageFlaw(flaw.kind, box)
    return None


def _scalar_flaw(whole: Box, num_boxes: int) -> CoverageFlaw | None:
    if num_boxes == 1:
        return None
    return CoverageFlaw("overlap" if num_boxes else "gap", whole)


def _bounds(whole: Box, boxes: Sequence[Box]) -> list[int]:
    """Sorted first-dim coordinates at which a box begins or ends."""
    bounds = {whole.lo[0], whole.hi[0]}
    for box in boxes:
        bounds.add(box.lo[0])
        bounds.add(box.hi[0])
    return sorted(bounds)
