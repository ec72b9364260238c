"""`profile`: which steps are recorded, and values that are none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.cli import main
from weft.config.profiled_steps import MOST_STEPS, profiled_steps
from weft.config.rules.sections import profile_faults
from weft.errors import EXIT_USER


@given(st.integers(1, 1000), st.integers(1, MOST_STEPS))
def test_the_end_is_no_part_of_the_range(first: int, length: int) -> None:
    text = f"{first}:{first + length}"
    assert profiled_steps(text) == range(first, first + length)
    assert not list(profile_faults(text, num_steps=first + length - 1))
    assert list(profile_faults(text, num_steps=first + length - 2))


def test_without_a_profile_no_step_is_recorded() -> None:
    assert not profiled_steps(None)
    assert not list(profile_faults(None, num_steps=1))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("10", "cannot be read"),
        ("a:b", "cannot be read"),
        ("-1:3", "cannot be read"),
        ("1:2:3", "cannot be read"),
        ("0:3", "the first step is 1"),
        ("5:5", "holds no step"),
        ("9:4", "holds no step"),
        ("1:500", "too many steps"),
        ("18:23", "after the end of the run"),
    ],
)
def test_other_values_are_one_line_before_anything_starts(
    text: str, what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_reached(run: object) -> None:
        raise AssertionError("the run was started")

    monkeypatch.setattr("weft.cli.train_checked", not_reached)
    assert main(["train", "--steps", "20", f"--profile={text}"]) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: profile: ")
    assert what in line
    fix = line.partition("Fix: --profile ")[2]
    assert not list(profile_faults(fix, num_steps=20))
