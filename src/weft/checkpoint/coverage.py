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
        ranges = []
        for lo, hi in zip(self.box.lo, self.box.hi, strict=True):
            ranges.append(f"{lo}:{hi}")
        listed = ", ".join(ranges)
        where = "no piece" if self.kind == "gap" else "more than one piece"
        return f"entries [{listed}] are in {where}"


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
    not_started = sorted(boxes, key=_first_start, reverse=True)
    active: list[Box] = []
    for lo, hi in pairwise(_bounds(whole, boxes)):
        while not_started and _first_start(not_started[-1]) == lo:
            active.append(not_started.pop())
        active = [box for box in active if box.hi[0] > lo]
        slices = [_remaining_dims(box) for box in active]
        flaw = coverage_flaw(_remaining_dims(whole), slices)
        if flaw is not None:
            box = Box(lo=(lo, *flaw.box.lo), hi=(hi, *flaw.box.hi))
            return CoverageFlaw(flaw.kind, box)
    return None


def _first_start(box: Box) -> int:
    return box.lo[0]


def _remaining_dims(box: Box) -> Box:
    """The box without its first dim."""
    return Box(lo=box.lo[1:], hi=box.hi[1:])


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
