"""Packed sequences: windows of a token stream with the documents in them, and rows of whole conversations.

Note [Windows]
    Sequence i is the window [i S, (i + 1) S) of the token stream, whatever documents begin or end
    in it:

        documents   a a a a a a b b c c c c c c c d ...          S = 6
        windows     [a a a a a a][b b c c c c][c c c d . .]
        ids          0 0 0 0 0 0  0 0 1 1 1 1  0 0 0 1
        positions    0 1 2 3 4 5  0 1 0 1 2 3  0 1 2 0
        targets      a a a a a -  b - c c c c  c c - d           - : the next token is in another document

    So no token is padding, no table of the documents is kept in memory, and every sample costs the
    same. The part of a document behind a window's end is a document of its own in the next window:
    its positions begin at 0 again, which keeps them below S.

Note [Rows]
    Conversations stay whole: the longest first, each is placed into the fullest row that has room
    for it (best-fit decreasing; Johnson et al. 1974), so that few tokens are padding.

        conversations   aaaaaa bbbb ccc dd e          S = 8
        rows            [a a a a a a d d][b b b b c c c e]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.data.document_bounds import Bounds, Ints, bounds_between


@dataclass(frozen=True)
class Packed:
    """One window of S tokens.

    Attributes:
        documents: documents_S, numbered from 0 in the window.
        positions: positions_S, from 0 in each document.
        is_last: bool_S, whether the next token is in another document.
    """

    documents: Ints
    positions: Ints
    is_last: NDArray[np.bool_]


def pack(bounds: Bounds, start: int, length: int) -> Packed:
    """The documents in the window of `length` tokens at `start`; see Note [Windows].

    Args:
        bounds: index of every document's first token, and the end of the last; documents may be
            empty.
    """
    # one more than the window: whether its last token ends a document is known from the token behind it
    is_first = np.zeros(length + 1, dtype=bool)
    is_first[bounds_between(bounds, start, start + length) - start] = True
    is_first_in_window = is_first[:length]
    indices = np.arange(length, dtype=np.int64)
    document_starts = np.maximum.accumulate(np.where(is_first_in_window, indices, 0))
    return Packed(
        documents=np.cumsum(is_first_in_window, dtype=np.int64),
        positions=indices - document_starts,
        is_last=is_first[1:],
    )


@dataclass(frozen=True)
class Rows:
    """Which items are in which row: those of row r are items[bounds[r] : bounds[r + 1]]."""

    items: Ints
    bounds: Ints

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, row: int) -> Ints:
        start = self.bounds[row]
        stop = self.bounds[row + 1]
        return self.items[start:stop]


def single_rows(num_items: int) -> Rows:
    """One item a row, in their order."""
    return Rows(items=np.arange(num_items), bounds=np.arange(num_items + 1))


def pack_rows(lengths: Ints, capacity: int) -> Rows:
    """Rows of whole items with at most `capacity` tokens together; see Note [Rows].

    Args:
        lengths: of the items, 1 to `capacity`.
    """
    rows: list[list[int]] = []
    rows_by_room: dict[int, list[int]] = {}
    rooms = 0  # bit n: some row has room for n more tokens
    longest_first = np.argsort(-lengths, kind="stable")
    for item in longest_first.tolist():
        length = int(lengths[item])
        enough = rooms >> length
        if enough:
            smallest = (enough & -enough).bit_length() - 1
            room = length + smallest
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms &= ~(1 << room)
            rows[row].append(item)
        else:
            room = capacity
            row = len(rows)
            rows.append([item])
        left = room - length
        if left:
            rows_by_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    counts = [len(row) for row in rows]
    items = [item for row in rows for item in row]
    return Rows(
        items=np.array(items, dtype=np.int64), bounds=np.cumsum([0, *counts], dtype=np.int64)
    )
