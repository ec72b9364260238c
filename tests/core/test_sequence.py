"""Sharding of sequences over cp: every column once, every visible pair once, equal work in every turn, hidden blocks skipped."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.attention_mask import AttentionMask
from weft.core.mesh import Mesh
from weft.core.sequence import BlockMask, SequenceBlocks, length_unit, zigzag

degrees, chunks = st.integers(1, 6), st.integers(1, 3)
masks = st.one_of(
    st.builds(AttentionMask, window=st.none() | st.integers(1, 12), prefix=st.integers(0, 8)),
    st.builds(AttentionMask, causal=st.just(False), window=st.none() | st.integers(1, 12)),
)


def columns(length: int, degree: int, index: int) -> list[int]:
    return [column for span in zigzag(length, degree, index) for column in span]


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
    own_columns = [columns(length, degree, index) for index in range(degree)]
    assert sorted(column for own in own_columns for column in own) == list(range(length))


@given(degrees, chunks, masks)
def test_blocks_hold_every_visible_pair_once_and_no_other(
    degree: int, chunk: int, mask: AttentionMask
) -> None:
    length = 2 * degree * chunk
    found = computed_pairs(SequenceBlocks(length, degree, mask))
    visible = [(q, k) for q in range(length) for k in range(length) if mask.allows(q, k)]
    assert sorted(found) == visible


@given(degrees, chunks, masks, st.data())
def test_blocks_hold_every_pair_within_a_document_and_skip_chunks_without_one(
    degree: int, chunk: int, mask: AttentionMask, data: st.DataObject
) -> None:
    num_chunks = 1 if degree == 1 else 2 * degree
    length = 2 * degree * chunk
    starts = data.draw(st.lists(st.booleans(), min_size=length, max_size=length))
    document = [sum(starts[: column + 1]) for column in range(length)]
    size = length // num_chunks
    by_chunk = [document[number * size : (number + 1) * size] for number in range(num_chunks)]
    ranges = tuple((min(numbers), max(numbers)) for numbers in by_chunk)
    blocks = SequenceBlocks(length, degree, mask, documents=(ranges,), has_documents=True)
    found = computed_pairs(blocks)
    assert len(found) == len(set(found))
    visible = {
        (q, k)
        for q in range(length)
        for k in range(length)
        if mask.allows(q, k) and document[q] == document[k]
    }
    assert visible <= set(found), "a pair is lost"
    for query, key in found:
        query_range, key_range = ranges[query // size], ranges[key // size]
        assert query_range[0] <= key_range[1]
        assert key_range[0] <= query_range[1]


@given(degrees, chunks, masks)
def test_turns_that_are_left_out_have_no_work_and_the_first_is_a_ranks_own(
    degree: int, chunk: int, mask: AttentionMask
) -> None:
    blocks = SequenceBlocks(2 * degree * chunk, degree, mask)
    assert blocks.ring_turns[0] == 0
    assert all(before < after for before, after in pairwise(blocks.ring_turns))
    for turn in range(degree):
        work = [blocks.block_masks(index, (index - turn) % degree) for index in range(degree)]
        assert any(work) == (turn in blocks.ring_turns)


def test_a_narrow_window_leaves_turns_out() -> None:
    """The picture of Note [Skipped blocks]."""
    blocks = SequenceBlocks(32, 4, AttentionMask(window=5))
    assert blocks.ring_turns == (0, 1, 3)
    chunk_sources = {number: set() for number in range(8)}
    for index in range(4):
        for source in range(4):
            for block in blocks.block_masks(index, source):
                first_query = blocks.columns(index)[block.queries][0]
                chunk_sources[first_query // 4].add(source)
    drawn = ["0", "01", "12", "23", "3", "32", "21", "10"]
    assert [chunk_sources[number] for number in range(8)] == [
        set(map(int, ranks)) for ranks in drawn
    ]


@given(degrees, chunks)
def test_in_every_turn_of_the_ring_every_rank_computes_the_same_number_of_scores(
    degree: int, chunk: int
) -> None:
    blocks = SequenceBlocks(2 * degree * chunk, degree, AttentionMask())
    for turn in range(degree):
        work = set()
        for index in range(degree):
            source = (index - turn) % degree
            found = [
                pair
                for block in blocks.block_masks(index, source)
                for pair in pairs(block, blocks, index, source)
            ]
            work.add(len(found))
        assert work == {2 * chunk**2 if turn else chunk * (2 * chunk + 1)}


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
