"""Blocks of the scores of one device: runs of queries, and the consecutive keys that a mask lets them see. No torch.

Note [Blocks of one device]
    The queries of a document see no key outside of it, those of a window few keys before them. So
    each document is cut into runs of queries, and each run is one block with the keys that its mask
    lets it see; what no query sees is never computed. Documents a, b, c, and a window of 3 with 2
    queries at a time:

        a │ ▲                 ▲  triangle: query i sees keys 0..i       q 0 1 │ ▲
        b │     ▲ ▲                                                     q 2 3 │ ▒ ▒ ▒
          │     ▲ ▲                                                     q 4 5 │     ▒ ▒ ▒ ▒
        c │         ▲ ▲       ▒  partial: masked element by element     q 6 7 │         ▒ ▒ ▒ ▒

    Each query stands in one block, so its softmax is that block's: nothing is merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from weft.core.attention_choice import AttentionCall, AttentionDevice, queries_at_a_time
from weft.core.attention_mask import AttentionMask
from weft.core.sequence import BlockKind

RowRuns = tuple[range, ...] | None
"""Columns of each document of a sequence, in order; None: a document's number comes back after
another one, so its columns are not consecutive.
"""


@dataclass(frozen=True)
class QueryBlock:
    """Consecutive queries, and all the keys that they see; both are columns of the sequence.

    Attributes:
        kind: see `weft.core.sequence.BlockMask`.
    """

    queries: range
    keys: range
    kind: BlockKind


def query_blocks(mask: AttentionMask, document: range, *, most: int) -> Iterator[QueryBlock]:
    """The blocks of the columns of one document, or of a sequence without documents.

    Args:
        most: queries of a block.

    >>> list(query_blocks(AttentionMask(), range(3, 6), most=8))
    [QueryBlock(queries=range(3, 6), keys=range(3, 6), kind='triangle')]
    >>> [block.keys for block in query_blocks(AttentionMask(window=3), range(6), most=2)]
    [range(0, 2), range(0, 4), range(2, 6)]
    """
    for start in range(document.start, document.stop, most):
        queries = range(start, min(start + most, document.stop))
        keys = _visible_keys(mask, queries, document)
        kind: BlockKind = "partial"
        if mask.sees_all(queries, keys):
            kind = "full"
        elif mask.is_triangle(queries, keys):
            kind = "triangle"
        yield QueryBlock(queries, keys, kind)


def _visible_keys(mask: AttentionMask, queries: range, document: range) -> range:
    """From the first to the last key of the document that any of these queries sees."""
    visible = mask.distances
    first = queries[0] - visible.largest
    last = queries[-1] - visible.smallest
    if mask.prefix:
        last = max(last, min(mask.prefix - 1, queries[-1] + visible.largest))
    start = int(max(document.start, first))
    stop = int(min(document.stop - 1, last)) + 1
    return range(start, stop)


@dataclass(frozen=True)
class RowBlock:
    """A block of the scores of some sequences.

    Attributes:
        rows: of the batch.
        is_mixed: its columns belong to several documents, in any order.
    """

    rows: slice
    queries: slice
    keys: slice
    kind: BlockKind
    is_mixed: bool = False


@lru_cache(maxsize=64)
def row_blocks(
    call: AttentionCall, device: AttentionDevice, runs: tuple[RowRuns, ...] | None
) -> tuple[RowBlock, ...]:
    """The blocks of all sequences of a call.

    Args:
        runs: documents of each sequence; None: each sequence is one document.
    """
    whole = range(call.length)
    rows_and_runs: list[tuple[slice, RowRuns]] = [
        (slice(row, row + 1), of_row) for row, of_row in enumerate(runs or ())
    ]
    if runs is None or all(of_row == (whole,) for of_row in runs):
        rows_and_runs = [(slice(0, call.rows), (whole,))]
    found: list[RowBlock] = []
    for rows, of_row in rows_and_runs:
        is_mixed = of_row is None
        for document in of_row or (whole,):
            num_rows = rows.stop - rows.start
            most = queries_at_a_time(call, device, document, rows=num_rows, is_mixed=is_mixed)
            for block in query_blocks(call.mask, document, most=most):
                queries = slice(block.queries.start, block.queries.stop)
                keys = slice(block.keys.start, block.keys.stop)
                kind: BlockKind = "partial" if is_mixed else block.kind
                found.append(RowBlock(rows, queries, keys, kind, is_mixed))
    return tuple(found)


def have_disjoint_keys(blocks: tuple[RowBlock, ...]) -> bool:
    """Whether each key stands in one block."""
    last = (0, 0)
    for block in blocks:
        if (block.rows.start, block.keys.start) < last:
            return False
        last = (block.rows.start, block.keys.stop)
    return True
