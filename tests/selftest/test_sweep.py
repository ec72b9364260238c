"""`weft prove --sweep`: layouts are proved, or trained with steps that are compared; a fault is printed with its command."""

from __future__ import annotations

import json
import shlex

from weft.cli import main
from weft.config.load import try_load
from weft.models import FAMILIES
from weft_selftest.generated_runs import Choices, generated_runs
from weft_selftest.mutants.all_mutants import all_mutants
from weft_selftest.mutants.plant import planted

SWEEP = ("prove", "--sweep", "0.001", "--seed", "12", "--json")


def test_a_layout_is_proved_and_its_steps_are_compared(capsys):
    assert main([*SWEEP, "--checks", "each"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layouts"], found["steps_compared"], found["failed"]) == (1, 2, [])


def test_a_fault_in_a_step_is_printed_with_the_command_that_repeats_it(capsys):
    with planted(all_mutants()["targets_are_shifted_twice"]):
        assert main([*SWEEP, "--checks", "steps"]) == 1
    (failed,) = json.loads(capsys.readouterr().out)["failed"]
    message, command = failed.split("\n  ")
    assert "step 1 is not what one device computes" in message
    words = shlex.split(command)
    assert words[:2] == ["weft", "train"]
    assert not try_load(words[2:], FAMILIES).faults


def test_runs_without_a_compared_step_are_counted(capsys, monkeypatch):
    """An equal run of which nothing was compared would say nothing."""
    monkeypatch.setattr("weft.prove.live_step.check.available_bytes", lambda comm: 0)
    assert main([*SWEEP[:-1], "--checks", "steps"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 run without a compared step"


def test_layouts_follow_from_the_seed():
    first, second, other = (next(generated_runs(seed, Choices())).words for seed in (3, 3, 4))
    assert first == second != other
