"""Fixes that faults name: each is a layout that passes validation."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from weft.config.load import load, try_load
from weft.config.rules import suggestions
from weft.config.rules.checks import MOST_SHOWN, as_flags, run_checks
from weft.config.rules.config_checks import config_checks
from weft.errors import Fault
from weft.models import FAMILIES
from weft.schedule.catalog import SCHEDULES

AXES = st.sampled_from([1, 1, 1, 1, 2, 2, 3, 4, 6, 8])
NUMBERS = st.sampled_from([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 30])
OPTIONS = {
    "model.name": st.sampled_from(sorted(FAMILIES)),
    "batch.global_size": NUMBERS,
    "batch.micro_size": st.sampled_from([1, 2, 3]),
    "pipeline.schedule": st.sampled_from(sorted(SCHEDULES)),
    "pipeline.chunks": st.sampled_from([1, 2, 2, 3, 4, 5]),
    "pipeline.split": st.sampled_from(["2 2", "1 3", "4", "1 1 1 1", "2 1"]),
    "parallel.sequence": st.booleans(),
    "parallel.context": st.sampled_from(["ring", "allgather", "ulysses"]),
    "data.seq_len": st.sampled_from([7, 8, 30, 32, 100, 128, 999]),
    "model.vocab": st.sampled_from([100, 256]),
    "precision.params": st.sampled_from(["bfloat16", "float16", "float32"]),
    "precision.compute": st.sampled_from(["bfloat16", "float16", "float32"]),
    "precision.reduce": st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
}
QUICK = (Phase.explicit, Phase.generate)
"""Each example reads several command lines: shrinking would take too long."""
wanted = st.fixed_dictionaries(
    dict.fromkeys(("pp", "dp", "ep", "cp", "tp"), AXES), optional=OPTIONS
)


def words_of(choices: dict[str, object]) -> list[str]:
    axes = ("pp", "dp", "ep", "cp", "tp")
    mesh = " ".join(f"{axis}{choices.pop(axis)}" for axis in axes)
    name = str(choices.get("model.name", "llama3"))
    if name == "mnist":
        choices.pop("model.vocab", None)
    return [
        "--mesh",
        mesh,
        *(word for key, value in choices.items() for word in (f"--{key}", *str(value).split())),
    ]


def faults_of(words: list[str]) -> tuple[Fault, ...]:
    loaded = try_load(words, FAMILIES)
    assert not loaded.faults
    return run_checks(loaded.run, config_checks)


def alternatives(fault: Fault) -> Iterator[list[str]]:
    """The flags of each way that a fix names, as words."""
    for way in re.split(r",? or (?=--)", fault.fix.partition(";")[0]):
        yield shlex.split(way)


def key_of(fault: Fault) -> tuple[str, str]:
    return fault.key, re.sub(r"\d+|float\d+|bfloat16", "N", fault.what)


@settings(max_examples=30, phases=QUICK)
@given(wanted)
def test_every_alternative_of_a_fix_removes_its_fault(choices: dict[str, object]) -> None:
    words = words_of(choices)
    for fault in faults_of(words):
        ways = list(alternatives(fault))
        assert 1 <= len(ways) <= MOST_SHOWN, fault
        for way in ways:
            assert way, fault
            assert way[0].startswith("--"), fault
            assert key_of(fault) not in map(key_of, faults_of([*words, *way])), (
                f"{fault}: {way} does not remove it"
            )


@settings(max_examples=20, phases=QUICK)
@given(wanted)
def test_following_the_first_fix_repeatedly_ends_at_a_valid_config(
    choices: dict[str, object],
) -> None:
    words = words_of(choices)
    most_rounds = len(config_checks(load([], FAMILIES)))
    for _ in range(most_rounds):
        faults = faults_of(words)
        if not faults:
            return
        words += next(alternatives(faults[0]))
    raise AssertionError(f"{words}: {faults_of(words)}")


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["--mesh", "tp8"], '--mesh "dp2 tp4" or --mesh tp4'),
        (["--mesh", "pp2 tp8"], '--mesh "pp2 dp2 tp4" or --mesh "pp2 tp4"'),
        (["--mesh", "ep4"], "--mesh dp4 or --mesh dp1"),
        (
            ["--mesh", "cp8", "--parallel.context", "ulysses"],
            "--parallel.context ring or --parallel.context allgather",
        ),
        (["--mesh", "pp8"], '--mesh "pp4 dp2" or --mesh pp4'),
        (
            ["--mesh", "pp2", "--pipeline.schedule", "zbv", "--pipeline.chunks", "3"],
            "--pipeline.chunks 2",
        ),
        (["--model.name", "mnist", "--mesh", "dp2 cp2"], "--mesh dp4 or --mesh dp2"),
        (["--model.name", "mnist", "--parallel.sequence", "True"], "--parallel.sequence False"),
        (["--model.name", "gpt2", "--data.seq_len", "999"], "--data.seq_len"),
    ],
)
def test_the_nearest_layout_that_works_is_named(words: list[str], fix: str) -> None:
    first = faults_of(words)[0]
    assert first.fix.startswith(fix), first


def test_flags_are_words_of_the_command_line() -> None:
    assert (
        as_flags({"mesh": "dp2 tp2", "pipeline.split": (2, 2)})
        == '--mesh "dp2 tp2" --pipeline.split 2 2'
    )
    for text in ('{"layer*.q": ["heads", null]}', "a $HOME `b`", "layer*", "it's", "plain"):
        assert shlex.split(as_flags({"model.axes": text})) == ["--model.axes", text]
    argv = shlex.split(as_flags({"mesh": ""}))
    mesh = load(argv, FAMILIES).mesh
    assert mesh == ""


def test_multiples_around_a_value_come_nearest_first() -> None:
    assert suggestions.nearest_multiples(30, 8, 0) == (32, 24)
    assert suggestions.nearest_multiples(32, 8, 1) == (24, 40)
