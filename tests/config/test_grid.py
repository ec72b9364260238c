"""The grid of a sweep: which words are values of one key, all combinations, and names that say them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.grid import MAX_NAME, MAX_RUNS, Grid, grid_of
from weft.config.keys import keys_of
from weft.config.load import load
from weft.errors import UserError
from weft.models import FAMILIES

KNOWN = keys_of(type(load([], FAMILIES)))


def grid(words: str) -> Grid:
    return grid_of(words.split(), KNOWN)


def test_all_combinations_in_order_with_the_last_key_fastest() -> None:
    found = grid("run.toml --optim.lr 1e-4 3e-4 --steps 5 --batch.global_size 8 16")
    assert [point.name for point in found.points] == [
        "lr=1e-4,global_size=8",
        "lr=1e-4,global_size=16",
        "lr=3e-4,global_size=8",
        "lr=3e-4,global_size=16",
    ]
    fixed = ("run.toml", "--steps", "5")
    assert found.points[1].words == (*fixed, "--optim.lr", "1e-4", "--batch.global_size", "16")
    assert found.points[1].values == {"optim.lr": "1e-4", "batch.global_size": "16"}
    assert found.keys == {"optim.lr": "lr", "batch.global_size": "global_size"}


def test_the_words_of_a_point_are_a_run() -> None:
    found = grid("--optim.lr=1e-4 --optim.lr 3e-4 --mesh dp2 --mesh pp2 dp2 --parallel.sequence")
    runs = [load(point.words, FAMILIES) for point in found.points]
    assert [(run.optim.lr, run.mesh) for run in runs] == [
        (1e-4, "dp2"),
        (1e-4, "pp2 dp2"),
        (3e-4, "dp2"),
        (3e-4, "pp2 dp2"),
    ]
    assert all(run.parallel.sequence for run in runs)


def test_keys_of_several_words_have_a_value_each_time_they_are_given() -> None:
    found = grid("--optim.betas 0.9 0.95 --optim.betas 0.9 0.99 --pipeline.split 1 2")
    assert [point.values for point in found.points] == [
        {"optim.betas": "0.9 0.95"},
        {"optim.betas": "0.9 0.99"},
    ]
    assert found.points[0].name == "betas=0.9-0.95"
    assert found.points[0].words[-5:-3] == ("1", "2")


def test_names_are_whole_keys_where_two_end_alike() -> None:
    (first, *_) = grid("--save.every 1 2 --eval.every 3 4").points
    assert first.name == "save.every=1,eval.every=3"


def test_paths_and_long_values_are_names_of_folders() -> None:
    names = [point.name for point in grid("--data.source /x/a:b.txt ../c.txt").points]
    assert names == ["source=x-a-b.txt", "source=..-c.txt"]
    long = "y" * 500
    (first, second) = grid(f"--data.source {long}1 {long}2").points
    assert first.name != second.name


@given(st.lists(st.text("ab/: ,=.", min_size=1, max_size=4), min_size=2, max_size=6, unique=True))
def test_names_differ_and_hold_no_separator(values: list[str]) -> None:
    words = [word for value in values for word in ("--data.source", value)]
    points = grid_of(words, KNOWN).points
    names = [point.name for point in points]
    assert len(set(names)) == len(values)
    for name in names:
        assert "/" not in name
        assert name not in (".", "..")
        assert len(name) <= MAX_NAME + 20


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", "weft sweep: no key has several values"),
        ("run.toml --optim.lr 1", "Fix: for example weft sweep --optim.lr 1e-4 3e-4"),
        ("--optim.betas 0.9 0.95", "no key has several values"),
        ("--optim.lr 1 2 1", "optim.lr: has a value twice (got 1). Fix: name each value once"),
        ("--optim.lr 1 --optim.lr 1", "optim.lr: has a value twice"),
    ],
)
def test_a_mistake_is_one_line(words: str, line: str) -> None:
    with pytest.raises(UserError) as raised:
        grid(words)
    (fault,) = raised.value.faults
    assert line in str(fault)


def test_too_many_runs_are_rejected_before_they_are_enumerated() -> None:
    values = " ".join(map(str, range(1, 102)))
    with pytest.raises(UserError, match=f"10,201 runs; need at most {MAX_RUNS:,}"):
        grid(f"--steps {values} --seed {values}")
