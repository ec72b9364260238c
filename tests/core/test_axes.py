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
AXES = ("dp", "ep", "tp")
lengths = st.integers(1, 23)
shapes = st.lists(st.integers(1, 23), min_size=1, max_size=3).map(tuple)


@st.composite
def rules(draw: st.DrawFn) -> dict[str, str]:
    """A mesh axis for each of three logical axes."""
    axes = draw(st.permutations(AXES))
    return dict(zip(LETTERS, axes, strict=True))


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


@given(shapes, rules(), meshes)
def test_boxes_of_all_ranks_cover_every_entry_exactly_once(
    shape: tuple[int, ...], rule: dict[str, str], mesh: Mesh
) -> None:
    axes = tuple(LETTERS[: len(shape)])
    pieces = set(boxes(shape, axes, rule=rule, mesh=mesh))
    held = set()
    for rank in range(mesh.size):
        box = box_of(shape, axes, rule=rule, mesh=mesh, rank=rank)
        held.add(box)
    assert held == pieces
    total = sum(piece.size for piece in pieces)
    assert total == math.prod(shape)
    solid = [piece for piece in pieces if piece.size]
    for one, other in itertools.combinations(solid, 2):
        common = one & other
        assert common.size == 0


@given(shapes, rules(), meshes, rules(), meshes)
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
        num_covered = 0
        for piece in have:
            common = wanted & piece
            num_covered += common.size
        assert num_covered == wanted.size


def test_a_box_indexes_the_array_of_another_box() -> None:
    outer = Box((2, 4), (8, 10))
    inner = Box((3, 5), (4, 9))
    rows, columns = inner.within(outer)
    assert rows == slice(1, 2)
    assert columns == slice(1, 5)
    whole = Box.whole((3, 4))
    rows, columns = whole.slices
    assert rows == slice(0, 3)
    assert columns == slice(0, 4)


def test_gradients_are_summed_where_tokens_differ_except_over_axes_that_shard() -> None:
    mesh = Mesh.parse("pp2 dp2 ep2 cp2 tp2")
    data = ("dp", "ep", "cp")
    column_weight = gradient_axes(mesh, varies=data, sharded=("tp",))
    assert column_weight == ("dp", "ep", "cp")
    norm_of_sequence_parallelism = gradient_axes(mesh, varies=(*data, "tp"), sharded=())
    assert norm_of_sequence_parallelism == ("dp", "ep", "cp", "tp")
    expert = gradient_axes(mesh, varies=data, sharded=("ep",))
    assert expert == ("dp", "cp")
    pipeline_alone = Mesh.parse("pp4")
    assert gradient_axes(pipeline_alone, varies=data, sharded=()) == ()


def test_axes_of_degree_one_shard_nothing() -> None:
    rule = {"heads": "tp"}
    without_tp = Mesh.parse("dp4")
    assert sharding_axes(("heads", "embed"), rule, without_tp) == ()
    with_tp = Mesh.parse("tp4")
    assert sharding_axes(("embed", "heads"), rule, with_tp) == ("tp",)


@st.composite
def small_boxes(draw: st.DrawFn) -> Box:
    """Boxes of up to four dims, up to four entries along each."""
    spans = []
    for _ in range(draw(st.integers(0, 4))):
        start = draw(st.integers(0, 5))
        length = draw(st.integers(1, 4))
        spans.append((start, start + length))
    return Box.of_spans(spans)


@given(small_boxes(), st.data())
def test_a_range_of_a_box_is_few_boxes_in_its_order(box: Box, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, box.size))
    stop = data.draw(st.integers(start, box.size))
    pieces = boxes_of_range(box, start, stop)
    entries = np.arange(box.size).reshape(box.shape)
    found: list[int] = []
    for piece in pieces:
        part = entries[piece.within(box)]
        found.extend(part.ravel().tolist())
    assert found == list(range(start, stop))
    num_dims = len(box.shape)
    assert len(pieces) <= max(1, 2 * num_dims - 1)
