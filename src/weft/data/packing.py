"""Packed sequences: which token of a sequence belongs to which document, and the position of each token in its document.

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
