"""The cut of a sequence: every column once, every causal pair once, the same work for every rank in every turn."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.mesh import Mesh
from weft.core.sequence import home_of, length_unit, meeting, zigzag


def columns(length: int, degree: int, index: int) -> list[int]:
    return [column for span in zigzag(length, degree, index) for column in span]


def pairs(length: int, degree: int, index: int, source: int, *, causal: bool) -> list[tuple[int, int]]:
    """(query column, key column) that rank `index` computes of the keys of rank `source`."""
    own, theirs = columns(length, degree, index), columns(length, degree, source)
    met = meeting(index, source, columns=len(own), causal=causal)
    rows, cols = own[met.queries], theirs[met.keys]
    return [(q, k) for i, q in enumerate(rows) for j, k in enumerate(cols) if j <= i or not met.causal]


degrees, chunks = st.integers(1, 6), st.integers(1, 3)


@given(degrees, chunks)
def test_every_column_lies_on_one_rank_and_is_found_there(degree: int, chunk: int) -> None:
    length = 2 * degree * chunk
    held = [columns(length, degree, index) for index in range(degree)]
    assert sorted(column for own in held for column in own) == list(range(length))
    for column in range(length):
        index, place = home_of(column, length, degree)
        assert held[index][place] == column


@given(degrees, chunks, st.booleans())
def test_meetings_hold_every_pair_that_sees_each_other_once_and_no_other(degree: int, chunk: int, causal: bool) -> None:
    length = 2 * degree * chunk
    met = [
        pair
        for index in range(degree)
        for source in range(degree)
        for pair in pairs(length, degree, index, source, causal=causal)
    ]
    seen = [(q, k) for q in range(length) for k in range(length) if k <= q or not causal]
    assert sorted(met) == seen


@given(degrees, chunks)
def test_in_every_turn_of_the_ring_every_rank_computes_the_same_number_of_scores(degree: int, chunk: int) -> None:
    length = 2 * degree * chunk
    for turn in range(degree):
        work = {len(pairs(length, degree, index, (index - turn) % degree, causal=True)) for index in range(degree)}
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
