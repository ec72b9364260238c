"""Boxes cover tensors exactly once, and gradients are summed over the axes that the gradient rule states."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.core.axes import (
    Box,
    box_of,
    boxes,
    boxes_of_range,
    gradient_axes,
    sharding_axes,
    span,
    span_sizes,
)
from weft.core.mesh import Mesh

LETTERS = "abc"
shapes = st.lists(st.integers(1, 23), min_size=1, max_size=3).map(tuple)
rules = st.permutations(["dp", "ep", "tp"]).map(lambda axes: dict(zip(LETTERS, axes, strict=True)))
meshes = st.tuples(*(st.integers(1, 4) for _ in range(3))).map(
    lambda degrees: Mesh(tuple(zip(("dp", "ep", "tp"), degrees, strict=True)))
)


@given(st.integers(0, 200), st.integers(1, 40))
def test_spans_follow_each_other_and_differ_by_at_most_one(length: int, parts: int) -> None:
    end = 0
    for index in range(parts):
        start, stop = span(length, parts, index)
        assert start == end
        end = stop
    assert end == length
    sizes = span_sizes(length, parts)
    assert max(sizes) - min(sizes) <= 1


@given(shapes, rules, meshes)
def test_boxes_of_all_ranks_cover_every_entry_exactly_once(
    shape: tuple[int, ...], rule: dict[str, str], mesh: Mesh
) -> None:
    axes = tuple(LETTERS[: len(shape)])
    pieces = set(boxes(shape, axes, rule=rule, mesh=mesh))
    held = set()
    for rank in range(mesh.size):
        held.add(box_of(shape, axes, rule=rule, mesh=mesh, rank=rank))
    assert held == pieces
    total = sum(piece.size for piece in pieces)
    assert total == math.prod(shape)
    solid = [piece for piece in pieces if piece.size]
    for one, other in itertools.combinations(solid, 2):
        assert (one & other).size == 0


@given(shapes, rules, meshes, rules, meshes)
def test_every_wanted_box_is_covered_by_the_boxes_of_another_layout(
    shape: tuple[int, ...],
    rule: dict[str, str],
    mesh: Mesh,
    other_rule: dict[str, str],
    other: Mesh,
) -> None:
    axes = tuple(LETTERS[: len(shape)])
    have = set(boxes(shape, axes, rule=rule, mesh=mesh))
    for wanted in boxes(shape, axes, rule=other_rule, mesh=other):
        covered = [wanted & piece for piece in have]
        assert sum(part.size for part in covered) == wanted.size


def test_a_box_indexes_the_array_of_another_box() -> None:
    outer = Box((2, 4), (8, 10))
    inner = Box((3, 5), (4, 9))
    assert inner.within(outer) == (slice(1, 2), slice(1, 5))
    whole = Box.whole((3, 4))
    assert whole.slices == (slice(0, 3), slice(0, 4))


def test_gradients_are_summed_where_tokens_differ_except_over_axes_that_shard() -> None:
    mesh = Mesh.parse("pp2 dp2 ep2 cp2 tp2")
    data = ("dp", "ep", "cp")
    assert gradient_axes(mesh, varies=data, sharded=("tp",)) == ("dp", "ep", "cp")
    assert gradient_axes(mesh, varies=(*data, "tp"), sharded=()) == ("dp", "ep", "cp", "tp")
    assert gradient_axes(mesh, varies=data, sharded=("ep",)) == ("dp", "cp")
    assert gradient_axes(Mesh.parse("pp4"), varies=data, sharded=()) == ()


def test_axes_of_degree_one_shard_nothing() -> None:
    assert sharding_axes(("heads", "embed"), {"heads": "tp"}, Mesh.parse("dp4")) == ()
    assert sharding_axes(("embed", "heads"), {"heads": "tp"}, Mesh.parse("tp4")) == ("tp",)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 4)), max_size=4), st.data())
def test_a_range_of_a_box_is_few_boxes_in_its_order(
    sides: list[tuple[int, int]], data: st.DataObject
) -> None:
    spans = [(lo, lo + length) for lo, length in sides]
    box = Box.of_spans(spans)
    numbers = st.integers(0, box.size)
    start, stop = sorted((data.draw(numbers), data.draw(numbers)))
    pieces = boxes_of_range(box, start, stop)
    entries = np.arange(box.size).reshape(box.shape)
    found: list[int] = []
    for piece in pieces:
        part = entries[piece.within(box)]
        found.extend(part.ravel().tolist())
    assert found == list(range(start, stop))
    assert len(pieces) <= max(1, 2 * len(sides) - 1)
