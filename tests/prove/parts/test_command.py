"""`weft prove --what`: its words, what each report covers, and parts that a run does not have."""

from __future__ import annotations

import json
import os
import shlex

import pytest

import weft
from tests.prove.faults import FLOAT64
from weft.commands.prove import prove
from weft.config.load import load
from weft.config.run import Run
from weft.errors import UserError
from weft.models import FAMILIES
from weft.prove.parts.names import COVERS, PARTS, PROVES_TRAINING, TRAINING, Coverage
from weft.start.prove_parts import named_parts, parts_of, take_what, trained_coverage


def run_of(*words: str) -> Run:
    return load(list(words), FAMILIES)


@pytest.mark.parametrize(
    ("words", "names", "rest"),
    [
        (["runs/a", "--what", "resume"], ["resume"], ["runs/a"]),
        (["--what", "resume", "export", "--json"], ["resume", "export"], ["--json"]),
        (["--what", "resume,dpo", "runs/a"], ["resume", "dpo"], ["runs/a"]),
        (["--what", "all", "c.toml", "--mesh", "dp2"], ["all"], ["c.toml", "--mesh", "dp2"]),
        (["--mesh", "dp2"], [], ["--mesh", "dp2"]),
        (["--what"], [], []),
    ],
)
def test_words_after_what_name_parts(words: list[str], names: list[str], rest: list[str]) -> None:
    assert take_what(words) == (names, rest)


def test_parts_are_proved_in_one_order() -> None:
    assert named_parts(["export", "resume"]) == ("resume", "export")
    assert named_parts(["all"]) == PARTS


@pytest.mark.parametrize("names", [[], ["resumes"], ["resume", "training"]])
def test_other_names_are_rejected(names: list[str]) -> None:
    with pytest.raises(UserError, match="--what"):
        named_parts(names)


def test_a_run_has_the_parts_that_its_config_asks_for() -> None:
    assert parts_of(run_of("--mesh", "dp2")) == ("resume", "generate", "export")
    assert parts_of(run_of("--mesh", "site2 dp2"))[-1] == "sites"
    assert "dpo" in parts_of(run_of("--loss", "dpo"))
    assert parts_of(run_of("--model.name", "mnist")) == ("resume",)


def test_the_verdict_of_a_training_names_what_it_does_not_cover() -> None:
    found = trained_coverage(run_of("--mesh", "dp2"))
    assert found.covered == (TRAINING,)
    assert found.uncovered == tuple(
        f"{COVERS[part]} (--what {part})" for part in ("resume", "generate", "export")
    )


def test_the_verdict_of_a_part_says_that_the_training_is_not_covered() -> None:
    found = Coverage.of(("resume",), parts=("resume", "generate"), is_trained=False)
    assert found.covered == (COVERS["resume"],)
    assert found.uncovered[0] == f"{TRAINING} ({PROVES_TRAINING})"


@pytest.mark.parametrize(
    ("words", "key", "fix"),
    [
        ("--what sites", "mesh", "--mesh"),
        ("--model.name mnist --what generate", "model.name", "--what resume"),
        ("--model.name mnist --what dpo", "model.name", "--what resume"),
        ("--model.name mnist --what export", "model.name", "--what resume"),
        ("--what resume --first 1", "--first", "--first 2"),
        ("--what resume --to tp7", "--to", "another mesh"),
        ("--to tp2", "--to", "--what resume"),
        ("--what resume --against transformers", "--against", "two commands"),
    ],
)
def test_what_a_run_does_not_have_is_named_with_a_fix(words: str, key: str, fix: str) -> None:
    with pytest.raises(UserError) as raised:
        prove(words.split())
    (fault,) = raised.value.faults
    assert fault.key == key
    assert fix in fault.fix


def test_a_report_says_what_it_covers(capsys: pytest.CaptureFixture[str]) -> None:
    words = f"--mesh dp2 --what generate --json {FLOAT64}"
    assert prove(words.split()) == os.EX_OK
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "equal"
    assert found["covered"] == [COVERS["generate"]]
    assert found["command"].endswith("--what generate")


@pytest.mark.slow
def test_python_proves_parts_of_a_run() -> None:
    report = weft.prove({"mesh": "dp2"}, what=("generate",))
    assert report.holds
    assert report.covered == (COVERS["generate"],)


@pytest.mark.slow
@pytest.mark.parametrize("words", ["--mesh dp2 --what all", "--mesh 'site2 dp2' --what all"])
def test_all_parts_of_a_run_are_equal(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert prove(shlex.split(words)) == os.EX_OK
    text = capsys.readouterr().out
    assert COVERS["dpo"] in text
