"""Sharding of sequences over cp: every column once, every visible pair once, equal work in every turn, hidden blocks skipped."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import attention_masks
from weft.core.attention_mask import AttentionMask
from weft.core.mesh import Mesh
from weft.core.sequence import BlockMask, SequenceBlocks, length_unit, zigzag

degrees = st.integers(1, 6)
chunks = st.integers(1, 3)
masks = attention_masks()


def columns(length: int, degree: int, index: int) -> list[int]:
    found: list[int] = []
    for span in zigzag(length, degree, index):
        found.extend(span)
    return found


def pairs(
    block: BlockMask, blocks: SequenceBlocks, index: int, source: int
) -> list[tuple[int, int]]:
    """(query column, key column) that a block computes; a partial one those that the mask allows."""
    queries = blocks.columns(index)[block.queries]
    keys = blocks.columns(source)[block.keys]
    computed = []
    for i, query in enumerate(queries):
        for j, key in enumerate(keys):
            is_hidden = block.kind == "triangle" and j > i
            is_masked = block.kind == "partial" and not blocks.mask.allows(query, key)
            if not is_hidden and not is_masked:
                computed.append((query, key))
    return computed


def computed_pairs(blocks: SequenceBlocks) -> list[tuple[int, int]]:
    found = []
    for index in range(blocks.num_ranks):
        for source in range(blocks.num_ranks):
            for block in blocks.block_masks(index, source):
                found.extend(pairs(block, blocks, index, source))
    return found


@given(degrees, chunks)
def test_every_column_lies_on_one_rank(degree: int, chunk: int) -> None:
    length = 2 * degree * chunk
    found: list[int] = []
    for index in range(degree):
        found.extend(columns(length, degree, index))
    assert sorted(found) == list(range(length))


@given(degrees, chunks, masks)
def test_blocks_hold_every_visible_pair_once_and_no_other(
    degree: int, chunk: int, mask: AttentionMask
) -> None:
    length = 2 * degree * chunk
    found = computed_pairs(SequenceBlocks(length, degree, mask))
    assert sorted(found) == visible_pairs(mask, length)


def visible_pairs(mask: AttentionMask, length: int) -> list[tuple[int, int]]:
    """(query, key) pairs of a sequence that a mask allows."""
    pairs = itertools.product(range(length), repeat=2)
    return [pair for pair in pairs if mask.allows(*pair)]


@dataclass(frozen=True)
class Documents:
    """A sequence of documents, cut into chunks.

    Attributes:
        numbers: the document of each column.
        ranges: the first and the last document of each chunk.
    """

    chunk_length: int
    numbers: list[int]
    ranges: list[tuple[int, int]]

    @staticmethod
    def of(starts: list[bool], num_chunks: int) -> Documents:
        """From the columns at which a document starts."""
        numbers = list(itertools.accumulate(map(int, starts)))
        chunk_length = len(numbers) // num_chunks
        ranges = []
        for first in range(0, len(numbers), chunk_length):
            of_chunk = numbers[first : first + chunk_length]
            ranges.append((min(of_chunk), max(of_chunk)))
        return Documents(chunk_length, numbers, ranges)

    def range_of(self, column: int) -> tuple[int, int]:
        """The first and the last document of the chunk of a column."""
        return self.ranges[column // self.chunk_length]


@given(degrees, chunks, masks, st.data())
def test_blocks_hold_every_pair_within_a_document_and_skip_chunks_without_one(
    degree: int, chunk: int, mask: AttentionMask, data: st.DataObject
) -> None:
    num_chunks = 1 if degree == 1 else 2 * degree
    length = 2 * degree * chunk
    starts = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    documents = Documents.of(starts, num_chunks)
    blocks = SequenceBlocks(
        length, degree, mask, documents=(tuple(documents.ranges),), has_documents=True
    )
    found = computed_pairs(blocks)
    computed = set(found)
    assert len(found) == len(computed)
    for query, key in visible_pairs(mask, length):
        if documents.numbers[query] == documents.numbers[key]:
            assert (query, key) in computed, "a pair is lost"
    for query, key in found:
        first_of_query, last_of_query = documents.range_of(query)
        first_of_key, last_of_key = documents.range_of(key)
        assert first_of_query <= last_of_key
        assert first_of_key <= last_of_query


@given(degrees, chunks, masks)
def test_turns_that_are_left_out_have_no_work_and_the_first_is_a_ranks_own(
    degree: int, chunk: int, mask: AttentionMask
) -> None:
    length = 2 * degree * chunk
    blocks = SequenceBlocks(length, degree, mask)
    turns = blocks.ring_turns
    assert turns[0] == 0
    for before, after in pairwise(turns):
        assert before < after
    for turn in range(degree):
        has_work = False
        for index in range(degree):
            source = (index - turn) % degree
            if blocks.block_masks(index, source):
                has_work = True
        assert has_work == (turn in turns)


def test_a_narrow_window_leaves_turns_out() -> None:
    """The picture of Note [Skipped blocks]."""
    blocks = SequenceBlocks(32, 4, AttentionMask(window=5))
    assert blocks.ring_turns == (0, 1, 3)
    sources_of_chunk: list[set[int]] = [set() for _ in range(8)]
    for index, source in itertools.product(range(4), repeat=2):
        for block in blocks.block_masks(index, source):
            first_query = blocks.columns(index)[block.queries][0]
            sources_of_chunk[first_query // 4].add(source)
    drawn = ["0", "01", "12", "23", "3", "32", "21", "10"]
    for sources, ranks in zip(sources_of_chunk, drawn, strict=True):
        assert sources == set(map(int, ranks))


@given(degrees, chunks)
def test_in_every_turn_of_the_ring_every_rank_computes_the_same_number_of_scores(
    degree: int, chunk: int
) -> None:
    length = 2 * degree * chunk
    blocks = SequenceBlocks(length, degree, AttentionMask())
    own_scores = chunk * (2 * chunk + 1)
    scores_of_others = 2 * chunk**2
    for turn in range(degree):
        expected = scores_of_others if turn else own_scores
        for index in range(degree):
            source = (index - turn) % degree
            num_scores = 0
            for block in blocks.block_masks(index, source):
                num_scores += len(pairs(block, blocks, index, source))
            assert num_scores == expected


@pytest.mark.parametrize(
    ("mesh", "sequence", "unit"),
    [
        ("", False, 1),
        ("dp4", True, 1),
        ("tp3", True, 3),
        ("tp3", False, 1),
        ("cp3 tp2", False, 6),
        ("cp2 tp3", True, 12),
    ],
)
def test_length_unit(mesh: str, sequence: bool, unit: int) -> None:
    assert length_unit(Mesh.parse(mesh), sequence_parallel=sequence) == unit
