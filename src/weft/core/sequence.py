"""Owns how a sequence is cut over the context axis: which rank holds which columns, and which of them see which.

Note [Zigzag]
    A causal token sees the tokens left of it, so the right end of a sequence costs most. With degree c a sequence is cut
    into 2c chunks and rank i holds chunks i and 2c-1-i, one cheap and one dear:

        c = 4    chunk   0  1  2  3  4  5  6  7
                 rank    0  1  2  3  3  2  1  0

    Rank i meets the keys of rank j (each has a first half, chunk i or j, and a second half):

        j = i    itself: causal within its own two chunks, in their order
        j < i    both halves of its queries see the first half of the keys, nobody the second
        j > i    its second half sees both halves of the keys, its first half none

    Each case computes as much as every other rank does in the same turn of a ring, and nothing that a mask would hide.
    Source: Brandon et al. 2023 (striped attention) for the imbalance; the pairing of ends is Megatron-LM's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from weft.core.mesh import Mesh

Context = Literal["ring", "allgather", "ulysses"]
"""How attention crosses the cut: keys and values pass from rank to rank, or are gathered, or heads change for columns."""


@dataclass(frozen=True)
class Meeting:
    """Which of a rank's queries meet which keys of one rank, as slices of their columns; `causal`: as a triangle."""

    queries: slice
    keys: slice
    causal: bool


def zigzag(length: int, degree: int, index: int) -> tuple[range, ...]:
    """Columns that rank `index` of `degree` holds of a sequence, in its order; see Note [Zigzag].

    >>> zigzag(8, 2, 0), zigzag(8, 2, 1), zigzag(8, 1, 0)
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)), (range(0, 8),))
    """
    if degree == 1:
        return (range(length),)
    assert length % (2 * degree) == 0, (
        f"{length} columns were to be refused at the door: 2 x cp{degree} does not divide"
    )
    chunk = length // (2 * degree)
    return tuple(range(chunk * number, chunk * (number + 1)) for number in (index, 2 * degree - 1 - index))


def home_of(column: int, length: int, degree: int) -> tuple[int, int]:
    """The rank that holds `column` of a sequence, and its place there.

    >>> [home_of(column, 8, 2) for column in range(8)]
    [(0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (0, 2), (0, 3)]
    """
    held = {index: [column for span in zigzag(length, degree, index) for column in span] for index in range(degree)}
    return next((index, columns.index(column)) for index, columns in held.items() if column in columns)


def meeting(index: int, source: int, *, columns: int, causal: bool) -> Meeting:
    """What the queries of rank `index` see of the keys of rank `source`, where each holds `columns`; see Note [Zigzag]."""
    whole, half = slice(0, columns), columns // 2
    if not causal or source == index:
        return Meeting(whole, whole, causal)
    if source < index:
        return Meeting(whole, slice(0, half), causal=False)
    return Meeting(slice(half, columns), whole, causal=False)


def length_unit(mesh: Mesh, *, sequence_parallel: bool) -> int:
    """What a sequence's length must be a multiple of: two chunks a cp rank, and equal parts of them for tp ranks.

    >>> length_unit(Mesh.parse("cp2 tp3"), sequence_parallel=True)
    12
    """
    cp, tp = mesh.degree("cp"), mesh.degree("tp") if sequence_parallel else 1
    return cp * math.lcm(2 if cp > 1 else 1, tp)
