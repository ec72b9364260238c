"""Attention masks: answers for blocks agree with those for single pairs, features have names, impossible masks are rejected."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.strategies import attention_masks
from weft.core.attention_mask import AttentionMask


@st.composite
def spans(draw: st.DrawFn) -> range:
    start = draw(st.integers(0, 9))
    length = draw(st.integers(1, 6))
    return range(start, start + length)


@given(attention_masks(), spans(), spans())
def test_questions_about_a_block_agree_with_its_pairs(
    mask: AttentionMask, queries: range, keys: range
) -> None:
    pairs = set(itertools.product(queries, keys))
    visible = {pair for pair in pairs if mask.allows(*pair)}
    assert mask.sees_any(queries, keys) == bool(visible)
    if mask.sees_all(queries, keys):
        assert visible == pairs
    if mask.is_triangle(queries, keys):
        triangle = {pair for pair in pairs if place(pair, queries, keys) >= 0}
        assert visible == triangle
    if visible:
        some_queries, some_keys = mask.visible_part(queries, keys)
        part = set(itertools.product(some_queries, some_keys))
        assert visible <= part


def place(pair: tuple[int, int], queries: range, keys: range) -> int:
    """How far below the diagonal of the block a pair lies; 0 on it."""
    query, key = pair
    return queries.index(query) - keys.index(key)


def test_a_window_counts_the_query_itself() -> None:
    """As `sliding_window` of transformers."""
    mask = AttentionMask(window=3)
    keys_of_query_5 = [key for key in range(9) if mask.allows(5, key)]
    assert keys_of_query_5 == [3, 4, 5]


def test_features_are_named() -> None:
    mask = AttentionMask(window=4, prefix=2, documents=False)
    assert mask.features == {"causal", "window", "prefix"}
    bidirectional = AttentionMask(causal=False)
    assert bidirectional.features == {"bidirectional", "documents"}


@pytest.mark.parametrize("wrong", [{"window": 0}, {"prefix": -1}, {"causal": False, "prefix": 2}])
def test_impossible_masks_are_rejected(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"window 0|prefix"):
        AttentionMask(**wrong)
