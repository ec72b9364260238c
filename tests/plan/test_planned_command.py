"""The command that `weft plan` prints describes exactly the layout that it found, whatever keys are given."""

from __future__ import annotations

import json
import random
import shlex
from pathlib import Path

import pytest

from weft.cli import main
from weft.config.layout_keys import LayoutKeys
from weft.config.load import load
from weft.models import FAMILIES
from weft_plan.commands.searched_run import SearchedRun
from weft_plan.search.layout_choice import Layout

SMALL = "--model.layers 4 --model.dim 64 --model.ffn 128 --data.seq_len 64 --batch.global_size 8"
GIVEN = {
    "nothing": "",
    "recomputation and schedule": "--parallel.recompute full --pipeline.schedule zero_bubble",
    "chunks": "--pipeline.schedule interleaved --pipeline.chunks 2 --mesh pp2,dp4",
    "stages": "--pipeline.split 1 1 1 1 --mesh pp4,dp2",
    "sequence": "--parallel.sequence True --mesh dp4,tp2",
    "ZeRO and micro-batch": "--parallel.zero=3 --batch.micro-size 2",
    "context": "--parallel.context ulysses --data.seq_len 16384",
    "mesh": "--mesh dp4 tp2",
}


def searched(words: str) -> SearchedRun:
    return SearchedRun.read([*words.split(), "--hardware", "h100"], 8)


def layout_of(command: str) -> dict[str, object]:
    """The searched keys of a printed command."""
    words = shlex.split(command)
    assert words[:2] == ["weft", "train"]
    keys = LayoutKeys.of(load(words[2:], FAMILIES))
    return {
        "mesh": keys.mesh.text,
        "batch.micro_size": keys.batch.micro_size,
        **{f"parallel.{name}": value for name, value in keys.parallel.model_dump().items()},
        **{f"pipeline.{name}": value for name, value in keys.pipeline.model_dump().items()},
    }


def assert_names(run: SearchedRun, layout: Layout) -> None:
    found = layout_of(run.command(layout))
    expected = layout.values
    assert {key: found[key] for key in expected} == expected


@pytest.mark.parametrize("given", GIVEN)
def test_the_command_is_the_layout_with_every_key_that_is_given(given: str) -> None:
    run = searched(f"{SMALL} {GIVEN[given]}")
    layouts = [layout for group in run.candidates().groups for layout in group]
    for layout in random.Random(given).sample(layouts, min(15, len(layouts))):
        assert_names(run, layout)


def test_a_config_file_keeps_its_keys(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[parallel]\nzero = 2\nrecompute = "full"\n')
    run = searched(f"{path} {SMALL} --parallel.recompute selective")
    first = next(layout for group in run.candidates().groups for layout in group)
    assert (first.zero, first.recompute) == (2, "selective")
    assert_names(run, first)


def test_explain_measures_the_layout_of_the_printed_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = "--parallel.recompute full --pipeline.schedule zero_bubble --mesh pp2"
    words = f"plan {SMALL} --hardware h100 --measured 1 --seconds 1 --json {given}"
    assert main(words.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    command = shlex.split(answer["command"])
    assert main(["explain", *command[2:], "--json"]) == 0
    explained = json.loads(capsys.readouterr().out)
    plan = explained["plan"]
    assert (plan["recompute"], plan["schedule"]) == ("full", "zero_bubble")
    assert explained["time"]["step_s"] == answer["best"][0]["step_s"][1]
