"""Owns sequences that hold several documents: which token belongs to which, and where each one begins.

Note [Windows]
    Sequence i is the window [i S, (i + 1) S) of the token stream, whatever documents begin or end in it:

        documents   a a a a a a b b c c c c c c c d ...          S = 6
        windows     [a a a a a a][b b c c c c][c c c d . .]
        ids          0 0 0 0 0 0  0 0 1 1 1 1  0 0 0 1
        positions    0 1 2 3 4 5  0 1 0 1 2 3  0 1 2 0
        targets      a a a a a -  b - c c c c  c c - d           - : the next token is of another document

    So no token is padding, no table of the documents is kept in memory, and a sample costs the same wherever it lies. The
    part of a document behind a window's end is a document of its own in the next window: its positions begin at 0 again,
    which keeps them below S.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from weft.data.bounds import Bounds, Ints, between


@dataclass(frozen=True)
class Packed:
    """One window of S tokens.

    Attributes:
        documents: documents_S, numbered from 0 in the window.
        positions: positions_S, from 0 in each document.
        leaves: bool_S, whether the token after this one is of another document.
    """

    documents: Ints
    positions: Ints
    leaves: NDArray[np.bool_]


def pack(bounds: Bounds, start: int, length: int) -> Packed:
    """The documents in the window of `length` tokens at `start`; see Note [Windows].

    Args:
        bounds: place of every document's first token, and the end of the last; documents may be empty.
    """
    begins = np.zeros(length + 1, dtype=bool)
    begins[between(bounds, start, start + length) - start] = True
    places, inside = np.arange(length, dtype=np.int64), begins[:length]
    return Packed(
        documents=np.cumsum(inside, dtype=np.int64),
        positions=places - np.maximum.accumulate(np.where(inside, places, 0)),
        leaves=begins[1:],
    )
