"""Sharding of sequences over the context axis: the columns of each rank, and the blocks of scores that it computes.

Note [Zigzag]
    A causal token sees the tokens left of it, so the right end of a sequence costs most. With c
    ranks a sequence is split into 2c chunks and rank i holds chunks i and 2c-1-i, one cheap and one
    expensive:

        c = 4    chunk   0  1  2  3  4  5  6  7
                 rank    0  1  2  3  3  2  1  0

    The queries of rank i against the keys of rank j (each has a first half, chunk i or j, and a
    second half):

        j = i    causal within its own two chunks, in their order
        j < i    both halves of the queries see the first half of the keys, neither sees the second
        j > i    the second half sees both halves of the keys, the first half none

    In each case a rank computes as much as every other rank does in the same turn of a ring, and
    nothing that a mask hides.
    Source: Brandon et al. 2023 (striped attention) for the imbalance; the pairing of ends is
        Megatron-LM's.

Note [Skipped blocks]
    A window, a prefix or packed documents hide more. Then each pair of a query chunk and a key
    chunk is a block of its own: it is skipped if no query sees a key, narrowed to the columns that
    the mask lets through, and masked element by element only if the mask divides it. A turn of the
    ring in which every rank skips everything is left out, see `ring_turns`:

        c = 4, window of at most one chunk and 1: a chunk sees itself and the chunk before it
                 query chunk    0   1   2   3   4   5   6   7
                 on rank        0   1   2   3   3   2   1   0
                 keys of ranks  0  01  12  23   3  32  21  10        turns 0, 1 and 3; turn 2 is left out
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from weft.core.attention_mask import AttentionMask
from weft.core.dimension import activation_axes, position_axes
from weft.core.mesh import Mesh

Context = Literal["ring", "allgather", "ulysses"]
"""How attention crosses ranks: keys and values pass around a ring, or are gathered, or heads are
exchanged for columns.
"""
DEFAULT_CONTEXT: Context = "ring"

DocumentRange = tuple[int, int]
"""Smallest and largest document number in a chunk of a sequence."""


BlockKind = Literal["full", "triangle", "partial"]


@dataclass(frozen=True)
class BlockMask:
    """Some of a rank's queries against some keys of one rank, as slices of the columns that each
    holds.

    Attributes:
        kind: full: each query sees each key; triangle: query i sees keys 0..i; partial: masked
            element by element.
    """

    queries: slice
    keys: slice
    kind: BlockKind

    def split(self, most: int) -> Iterator[BlockMask]:
        """The same scores as blocks of at most this number of queries.

        >>> [part.keys.stop for part in BlockMask(slice(0, 6), slice(0, 6), "triangle").split(2)]
        [2, 4, 6]
        """
        first, stop = self.queries.start, self.queries.stop
        for start in range(first, stop, most):
            queries = slice(start, min(start + most, stop))
            if self.kind == "triangle":
                keys = slice(self.keys.start, self.keys.start + queries.stop - first)
                yield BlockMask(queries, keys, "triangle" if start == first else "partial")
            else:
                yield BlockMask(queries, self.keys, self.kind)


@dataclass(frozen=True)
class SequenceBlocks:
    """The blocks of scores of one attention over sequences that `num_ranks` ranks share.

    Attributes:
        length: columns of a whole sequence.
        documents: document ranges of each chunk of each sequence, [row][chunk]; None: nothing is
            known of documents, or the mask ignores them.
        has_documents: whether the mask depends on documents, known or not.
    """

    length: int
    num_ranks: int
    mask: AttentionMask
    documents: tuple[tuple[DocumentRange, ...], ...] | None = None
    has_documents: bool = False

    def block_masks(self, index: int, source: int) -> tuple[BlockMask, ...]:
        """Blocks of the queries of rank `index` against the keys of rank `source`.

        The first ones of a rank against itself let every query see a key.
        """
        if not self._is_by_chunk:
            return (self._merged_block(index, source),)
        own_chunk_blocks: list[BlockMask] = []
        other_blocks: list[BlockMask] = []
        for queries in self._chunks(index):
            for keys in self._chunks(source):
                block = self._chunk_block(queries, keys)
                if block is None:
                    continue
                if queries == keys:
                    own_chunk_blocks.append(block)
                else:
                    other_blocks.append(block)
        return (*own_chunk_blocks, *other_blocks)

    @cached_property
    def ring_turns(self) -> tuple[int, ...]:
        """Turns of the ring in which any rank computes; at turn t rank i has the keys of rank i -
        t. Turn 0 is always one.
        """
        turns = range(self.num_ranks)
        if not self._is_by_chunk:
            return tuple(turns)
        return tuple(filter(self._has_work, turns))

    def _has_work(self, turn: int) -> bool:
        for index in range(self.num_ranks):
            source = (index - turn) % self.num_ranks
            if self.block_masks(index, source):
                return True
        return False

    def columns(self, index: int) -> tuple[int, ...]:
        """Columns of a sequence that rank `index` holds, in its order."""
        columns: list[int] = []
        for span in zigzag(self.length, self.num_ranks, index):
            columns.extend(span)
        return tuple(columns)

    @property
    def _is_by_chunk(self) -> bool:
        has_window = self.mask.window is not None
        has_prefix = self.mask.prefix > 0
        return self.has_documents or has_window or has_prefix

    def _chunks(self, index: int) -> Iterator[_Chunk]:
        offset = 0
        for span in zigzag(self.length, self.num_ranks, index):
            size = len(span)
            yield _Chunk(number=span.start // size, columns=span, offset=offset)
            offset += size

    def _merged_block(self, index: int, source: int) -> BlockMask:
        """Of a causal or bidirectional mask: one block a turn, see Note [Zigzag]."""
        num_columns = self.length // self.num_ranks
        middle = num_columns // 2
        whole = slice(0, num_columns)
        first_half = slice(0, middle)
        second_half = slice(middle, num_columns)
        if not self.mask.causal:
            return BlockMask(whole, whole, "full")
        if source == index:
            return BlockMask(whole, whole, "triangle")
        if source < index:
            return BlockMask(whole, first_half, "full")
        return BlockMask(second_half, whole, "full")

    def _chunk_block(self, queries: _Chunk, keys: _Chunk) -> BlockMask | None:
        """See Note [Skipped blocks]; None: no query sees a key."""
        mask = self.mask
        shared = self._shared_documents(queries.number, keys.number)
        if shared == "none" or not mask.sees_any(queries.columns, keys.columns):
            return None
        query_columns, key_columns = mask.visible_part(queries.columns, keys.columns)
        kind: BlockKind = "partial"
        if shared == "all":
            if mask.sees_all(query_columns, key_columns):
                kind = "full"
            elif mask.is_triangle(query_columns, key_columns):
                kind = "triangle"
        return BlockMask(
            queries=queries.local(query_columns), keys=keys.local(key_columns), kind=kind
        )

    def _shared_documents(self, one: int, other: int) -> Literal["none", "some", "all"]:
        """Which tokens of two chunks may be of the same document."""
        if not self.has_documents:
            return "all"
        if self.documents is None:
            return "some"
        num_same = 0
        num_overlapping = 0
        for row in self.documents:
            first, last = row[one]
            other_first, other_last = row[other]
            if first == last == other_first == other_last:
                num_same += 1
            if first <= other_last and other_first <= last:
                num_overlapping += 1
        if num_same == len(self.documents):
            return "all"
        return "some" if num_overlapping else "none"


@dataclass(frozen=True)
class _Chunk:
    """Consecutive columns of a sequence, and where the rank that holds them has the first one."""

    number: int
    columns: range
    offset: int

    def local(self, columns: range) -> slice:
        """Some of its columns, as a slice of the rank's columns."""
        shift = self.offset - self.columns.start
        start = columns.start + shift
        stop = columns.stop + shift
        return slice(start, stop)


def zigzag(length: int, degree: int, index: int) -> tuple[range, ...]:
    """Columns that rank `index` of `degree` ranks holds of a sequence, in its order; see Note
    [Zigzag].

    >>> zigzag(8, 2, 0), zigzag(8, 2, 1), zigzag(8, 1, 0)
    ((range(0, 2), range(6, 8)), (range(2, 4), range(4, 6)), (range(0, 8),))
    """
    if degree == 1:
        return (range(length),)
    num_chunks = 2 * degree
    assert length % num_chunks == 0, (
        f"{length} columns are validated to be a multiple of 2 x cp{degree}"
    )
    chunk = length // num_chunks
    start = chunk * index
    stop = start + chunk
    early = range(start, stop)
    late = range(length - stop, length - start)
    return early, late


def length_unit(mesh: Mesh, *, sequence_parallel: bool) -> int:
    """What a sequence's length must be a multiple of: two chunks a cp rank, and equal parts of them
    for tp ranks.

    >>> length_unit(Mesh.parse("cp2 tp3"), sequence_parallel=True)
    12
    """
    position_ranks = mesh.degree(position_axes())
    chunks = 2 if position_ranks > 1 else 1
    if not sequence_parallel:
        return position_ranks * chunks
    activation_ranks = mesh.degree(activation_axes())
    return position_ranks * math.lcm(chunks, activation_ranks)
