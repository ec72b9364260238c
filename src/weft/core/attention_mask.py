"""Attention masks as values: which keys a query may see, by column, and which blocks of keys a mask hides. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Feature = Literal[
    "causal",
    "bidirectional",
    "window",
    "documents",
    "prefix",
    "softcap",
    "sinks",
    "head_bias",
]
"""What a model can require of attention, as messages name it."""

ALL_FEATURES: frozenset[Feature] = frozenset(get_args(Feature))


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a query may see. Columns count the tokens of a sequence from 0; all conditions
    hold together.

    Attributes:
        causal: the query at column q sees keys at columns 0..q; False: bidirectional.
        window: distance limit |q - k| < window: causal, the keys q-window+1..q (`sliding_window` of transformers).
        documents: tokens see their own document only, where a batch packs several into a sequence.
        prefix: keys in the first `prefix` columns are visible to all queries of a causal mask
            (prefix LM).
    """

    causal: bool = True
    window: int | None = None
    documents: bool = True
    prefix: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"window {self.window}: a query sees 1 key at least, its own")
        is_negative = self.prefix < 0
        lacks_causal = self.prefix > 0 and not self.causal
        if is_negative or lacks_causal:
            raise ValueError(f"prefix {self.prefix}: needs 0 or more columns and a causal mask")

    @property
    def features(self) -> frozenset[Feature]:
        """What an implementation must support."""
        found: set[Feature] = {"causal" if self.causal else "bidirectional"}
        if self.window is not None:
            found.add("window")
        if self.documents:
            found.add("documents")
        if self.prefix:
            found.add("prefix")
        return frozenset(found)

    @property
    def distances(self) -> tuple[float, float]:
        """Smallest and largest distance (query column - key column) that is visible, without
        `prefix`.
        """
        farthest = float("inf")
        if self.window is not None:
            farthest = self.window - 1
        nearest = 0 if self.causal else -farthest
        return nearest, farthest

    def allows(self, query: int, key: int) -> bool:
        """Whether the query at one column sees the key at another, of the same document.

        >>> mask = AttentionMask(window=2)
        >>> tuple(mask.allows(5, key) for key in (3, 4, 5, 6))
        (False, True, True, False)
        """
        nearest, farthest = self.distances
        if key < self.prefix:
            nearest = -farthest
        distance = query - key
        return nearest <= distance <= farthest

    def sees_any(self, queries: range, keys: range) -> bool:
        """Whether any of these queries sees any of these keys; both are consecutive columns.

        >>> AttentionMask(window=2).sees_any(range(8, 12), range(4, 8)), AttentionMask().sees_any(range(4), range(4, 8))
        (True, False)
        """
        nearest, farthest = self.distances
        if _overlap(queries, keys, nearest, farthest):
            return True
        prefix_stop = min(keys.stop, self.prefix)
        keys_in_prefix = range(keys.start, prefix_stop)
        return _overlap(queries, keys_in_prefix, -farthest, farthest)

    def sees_all(self, queries: range, keys: range) -> bool:
        """Whether each of these queries surely sees each of these keys.

        >>> AttentionMask().sees_all(range(4, 8), range(4)), AttentionMask(window=4).sees_all(range(4, 8), range(4))
        (True, False)
        """
        nearest, farthest = self.distances
        if keys.stop <= self.prefix:
            nearest = -farthest
        smallest, largest = _distances_between(queries, keys)
        return nearest <= smallest and largest <= farthest

    def visible_part(self, queries: range, keys: range) -> tuple[range, range]:
        """The consecutive queries that see any of these keys, and the consecutive keys that those
        see, of a visible block.

        >>> AttentionMask(window=2).visible_part(range(8, 12), range(4, 8))
        (range(8, 9), range(7, 8))
        """
        nearest, farthest = self.distances
        if self.prefix:
            nearest = -farthest
        visible_queries = _narrowed(
            queries,
            first=keys[0] + nearest,
            last=keys[-1] + farthest,
        )
        visible_keys = _narrowed(
            keys,
            first=visible_queries[0] - farthest,
            last=visible_queries[-1] - nearest,
        )
        return visible_queries, visible_keys

    def is_triangle(self, queries: range, keys: range) -> bool:
        """Whether query i of the block sees exactly the keys 0..i of the block.

        >>> AttentionMask().is_triangle(range(4, 8), range(4, 8)), AttentionMask(window=3).is_triangle(range(4), range(4))
        (True, False)
        """
        nearest, farthest = self.distances
        if queries != keys or keys.start < self.prefix:
            return False
        largest = len(queries) - 1
        return nearest == 0 and largest <= farthest


CAUSAL = AttentionMask()
"""Each query sees itself and the keys before it, of its own document."""


def _overlap(
    queries: range,
    keys: range,
    nearest: float,
    farthest: float,
) -> bool:
    """Whether a query and a key exist whose distance lies between the two bounds."""
    if not queries or not keys:
        return False
    smallest, largest = _distances_between(queries, keys)
    return max(smallest, nearest) <= min(largest, farthest)


def _distances_between(queries: range, keys: range) -> tuple[int, int]:
    """Smallest and largest distance of a query to a key."""
    smallest = queries[0] - keys[-1]
    largest = queries[-1] - keys[0]
    return smallest, largest


def _narrowed(
    columns: range,
    *,
    first: float,
    last: float,
) -> range:
    """Those columns that lie between two bounds, both included."""
    start = int(max(columns[0], first))
    end = int(min(columns[-1], last))
    return range(start, end + 1)
