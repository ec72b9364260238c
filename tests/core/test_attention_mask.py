"""Attention masks: answers for blocks agree with those for single pairs, features have names, impossible masks are rejected."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.attention_mask import AttentionMask

spans = st.builds(
    lambda start, length: range(start, start + length), st.integers(0, 9), st.integers(1, 6)
)
masks = st.one_of(
    st.builds(AttentionMask, window=st.none() | st.integers(1, 12), prefix=st.integers(0, 8)),
    st.builds(AttentionMask, causal=st.just(False), window=st.none() | st.integers(1, 12)),
)


@given(masks, spans, spans)
def test_questions_about_a_block_agree_with_its_pairs(
    mask: AttentionMask, queries: range, keys: range
) -> None:
    pairs = list(itertools.product(queries, keys))
    visible = {pair for pair in pairs if mask.allows(*pair)}
    assert mask.sees_any(queries, keys) == bool(visible)
    if mask.sees_all(queries, keys):
        assert visible == set(pairs)
    if mask.is_triangle(queries, keys):
        triangle = {pair for pair in pairs if place(pair, queries, keys) >= 0}
        assert visible == triangle
    if visible:
        some_queries, some_keys = mask.visible_part(queries, keys)
        assert visible <= set(itertools.product(some_queries, some_keys))


def place(pair: tuple[int, int], queries: range, keys: range) -> int:
    """How far below the diagonal of the block a pair lies; 0 on it."""
    query, key = pair
    return queries.index(query) - keys.index(key)


def test_a_window_counts_the_query_itself() -> None:
    """As `sliding_window` of transformers."""
    actual = [key for key in range(9) if AttentionMask(window=3).allows(5, key)]
    assert actual == [3, 4, 5]


def test_features_are_named() -> None:
    mask = AttentionMask(window=4, prefix=2, documents=False)
    assert mask.features == {"causal", "window", "prefix"}
    assert AttentionMask(causal=False).features == {"bidirectional", "documents"}


@pytest.mark.parametrize("wrong", [{"window": 0}, {"prefix": -1}, {"causal": False, "prefix": 2}])
def test_impossible_masks_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"window 0|prefix"):
        AttentionMask(**wrong)
