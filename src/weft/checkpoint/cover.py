"""Owns the question whether boxes make up a whole: every entry in one box, none in two. Pure: no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from weft.core.axes import Box


@dataclass(frozen=True)
class Flaw:
    """Entries in no box (a hole) or in several (doubled)."""

    kind: Literal["hole", "doubled"]
    box: Box

    def __str__(self) -> str:
        entries = f"[{', '.join(f'{lo}:{hi}' for lo, hi in zip(self.box.lo, self.box.hi, strict=True))}]"
        return f"entries {entries} are in {'no piece' if self.kind == 'hole' else 'more than one piece'}"


def first_flaw(whole: Box, boxes: Sequence[Box]) -> Flaw | None:
    """What keeps `boxes` (parts of `whole`) from covering every entry of `whole` exactly once; None: nothing does.

    Sweeps over the first dim: between two neighbouring bounds the boxes at hand do not change, and what they leave of the
    other dims is the same question with one dim less.
    """
    if whole.size == 0:
        return None
    boxes = [box for box in boxes if box.size]
    if len(boxes) == 1 and boxes[0] == whole:
        return None
    if not whole.lo:
        return None if len(boxes) == 1 else Flaw("doubled" if boxes else "hole", whole)
    bounds = sorted({whole.lo[0], whole.hi[0], *(box.lo[0] for box in boxes), *(box.hi[0] for box in boxes)})
    rest, coming, here = Box(whole.lo[1:], whole.hi[1:]), sorted(boxes, key=lambda box: -box.lo[0]), list[Box]()
    for lo, hi in pairwise(bounds):
        while coming and coming[-1].lo[0] == lo:
            here.append(coming.pop())
        here = [box for box in here if box.hi[0] > lo]
        if flaw := first_flaw(rest, [Box(box.lo[1:], box.hi[1:]) for box in here]):
            return Flaw(flaw.kind, Box((lo, *flaw.box.lo), (hi, *flaw.box.hi)))
    return None
