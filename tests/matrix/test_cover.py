"""The covering rows contain every feasible combination of three choices; a row is valid if config validation accepts it."""

from __future__ import annotations

import random

import pytest

from tests.matrix import cover
from tests.matrix.cover import (
    CHOICES,
    LIST,
    NAMES,
    case_of,
    complete,
    every_part,
    is_valid,
    parts,
    read_rows,
)
from tests.matrix.layouts import Case, fits
from tests.matrix.sweep import every_case, sample
from tests.small_models import TEXT_FAMILIES
from weft.core.dimension import exact_axes
from weft.schedule.catalog import SCHEDULES


def rows() -> list[dict[str, object]]:
    """The rows of the list, as choices; one whose axes come in the same order under several
    nestings, as several.
    """
    models = {}
    for name in CHOICES["model"]:
        family = name.partition(" ")[0]
        models[family, "grouped" in name] = name
    found = []
    for case in read_rows(LIST):
        axes = [axis for axis, _ in case.grid.axes]
        nested = [
            text
            for text in CHOICES["nesting"]
            if [axis for axis in text.split() if axis in axes] == axes
        ]
        fields = NAMES[NAMES.index("microbatches") :]
        row = {name: getattr(case, name) for name in fields}
        row |= {axis: case.grid.degree(axis) for axis in exact_axes()}
        row |= {
            "model": models[case.family, case.grouped],
            "schedule": f"{case.schedule} {case.chunks}",
        }
        found += [{**row, "nesting": text} for text in nested]
    return found


def test_rows_are_valid_layouts() -> None:
    assert all(map(fits, every_case()))
    assert {case_of(row) for row in rows()} == set(read_rows(LIST))


@pytest.mark.parametrize("strength", [2, 3])
def test_every_combination_of_choices_that_can_meet_meets_in_some_row(strength: int) -> None:
    """What no row holds cannot be completed to a layout, however the rest is drawn."""
    held = {part for row in rows() for part in parts(row, strength)}
    absent = [part for part in every_part(strength) if part not in held]
    dice = random.Random(7)
    asked = absent if strength == 2 else dice.sample(absent, 60)
    assert not [part for part in asked if next(complete(part, dice, 200), None)]


def test_the_sweep_has_every_schedule_model_and_mesh_of_five_axes() -> None:
    cases = every_case()
    assert set(sample(120, seed=21)) <= set(cases)
    assert {case.schedule for case in cases} == set(SCHEDULES)
    assert {case.family for case in cases} == set(TEXT_FAMILIES)
    assert any(len(case.grid.axes) == 5 for case in cases)
    count = len(set(map(str, cases)))
    assert count == len(cases), "names tell layouts apart"


def test_choices_that_stand_for_nothing_or_do_not_fit_are_no_rows() -> None:
    row = {name: values[0] for name, values in CHOICES.items()}
    assert is_valid(row)
    assert not is_valid({**row, "sequence": True})
    assert not is_valid({**row, "ep": 2})
    assert not is_valid({**row, "pp": 2, "schedule": "interleaved 2", "microbatches": 3})
    assert cover.acts({**row, "model": "deepseek", "tp": 4, "cp": 2, "context": "ulysses"})
    assert not is_valid({**row, "model": "deepseek", "tp": 4, "cp": 2, "context": "ulysses"})
    assert not fits(Case("tp3"))
