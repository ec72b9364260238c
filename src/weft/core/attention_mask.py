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
    "dropout",
]
"""What a model can require of attention, as messages name it."""

ALL_FEATURES: frozenset[Feature] = frozenset(get_args(Feature))


@dataclass(frozen=True)
class DistanceRange:
    """Distances (query column - key column) from `smallest` to `largest`, both included."""

    smallest: float
    largest: float

    @staticmethod
    def between(queries: range, keys: range) -> DistanceRange:
        """Those of any of these queries to any of these keys; both are consecutive columns."""
        return DistanceRange(smallest=queries[0] - keys[-1], largest=queries[-1] - keys[0])

    @property
    def both_ways(self) -> DistanceRange:
        """The same with keys as far behind the query as before it."""
        return DistanceRange(-self.largest, self.largest)

    def overlaps(self, other: DistanceRange) -> bool:
        """Whether a distance lies in both ranges."""
        smallest = max(self.smallest, other.smallest)
        largest = min(self.largest, other.largest)
        return smallest <= largest

    def contains(self, other: DistanceRange) -> bool:
        """Whether all distances of the other range lie in this one."""
        starts_before = self.smallest <= other.smallest
        ends_after = other.largest <= self.largest
        return starts_before and ends_after


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
    def distances(self) -> DistanceRange:
        """Distances that are visible, without `prefix`."""
        largest = float("inf")
        if self.window is not None:
            largest = self.window - 1
        smallest = 0 if self.causal else -largest
        return DistanceRange(smallest, largest)

    def allows(self, query: int, key: int) -> bool:
        """Whether the query at one column sees the key at another, of the same document.

        >>> mask = AttentionMask(window=2)
        >>> tuple(mask.allows(5, key) for key in (3, 4, 5, 6))
        (False, True, True, False)
        """
        visible = self.distances
        if key < self.prefix:
            visible = visible.both_ways
        distance = query - key
        return visible.smallest <= distance <= visible.largest

    def sees_any(self, queries: range, keys: range) -> bool:
        """Whether any of these queries sees any of these keys; both are consecutive columns.

        >>> AttentionMask(window=2).sees_any(range(8, 12), range(4, 8)), AttentionMask().sees_any(range(4), range(4, 8))
        (True, False)
        """
        if not queries or not keys:
            return False
        visible = self.distances
        if visible.overlaps(DistanceRange.between(queries, keys)):
            return True
        prefix_stop = min(keys.stop, self.prefix)
        keys_in_prefix = range(keys.start, prefix_stop)
        if not keys_in_prefix:
            return False
        in_prefix = DistanceRange.between(queries, keys_in_prefix)
        return visible.both_ways.overlaps(in_prefix)

    def sees_all(self, queries: range, keys: range) -> bool:
        """Whether each of these queries surely sees each of these keys.

        >>> AttentionMask().sees_all(range(4, 8), range(4)), AttentionMask(window=4).sees_all(range(4, 8), range(4))
        (True, False)
        """
        visible = self.distances
        if keys.stop <= self.prefix:
            visible = visible.both_ways
        return visible.contains(DistanceRange.between(queries, keys))

    def visible_part(self, queries: range, keys: range) -> tuple[range, range]:
        """The consecutive queries that see any of these keys, and the consecutive keys that those
        see, of a visible block.

        >>> AttentionMask(window=2).visible_part(range(8, 12), range(4, 8))
        (range(8, 9), range(7, 8))
        """
        visible = self.distances
        if self.prefix:
            visible = visible.both_ways
        visible_queries = _narrowed(
            queries, first=keys[0] + visible.smallest, last=keys[-1] + visible.largest
        )
        visible_keys = _narrowed(
            keys,
            first=visible_queries[0] - visible.largest,
            last=visible_queries[-1] - visible.smallest,
        )
        return visible_queries, visible_keys

    def is_triangle(self, queries: range, keys: range) -> bool:
        """Whether query i of the block sees exactly the keys 0..i of the block.

        >>> AttentionMask().is_triangle(range(4, 8), range(4, 8)), AttentionMask(window=3).is_triangle(range(4), range(4))
        (True, False)
        """
        if queries != keys or keys.start < self.prefix:
            return False
        visible = self.distances
        first_to_last = len(queries) - 1
        return visible.smallest == 0 and first_to_last <= visible.largest


CAUSAL = AttentionMask()
"""Each query sees itself and the keys before it, of its own document."""


def _narrowed(columns: range, *, first: float, last: float) -> range:
    """Those columns that lie between two bounds, both included."""
    start = int(max(columns[0], first))
    end = int(min(columns[-1], last))
    return range(start, end + 1)
