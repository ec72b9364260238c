"""A schedule file in a config: its path is resolved, its content stored, and a run starts again without the file."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from weft.config.changed_runs import command_of
from weft.config.load import load, try_load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.config.run import Run, plan_of
from weft.config.small_runs import reduced
from weft.config.smaller_cases import DEFAULTS
from weft.config.toml import dump
from weft.layout.plan import Plan
from weft.models import FAMILIES
from weft.prove.small_sizes import accepts_sizes
from weft.schedule.catalog import make_table
from weft.schedule.table_file import table_lines

TABLE = make_table("zbv", ranks=2, microbatches=3)
WORDS = ("--mesh", "pp2", "--batch.micro_size", "1", "--batch.global_size", "3")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.schedule").write_text(TABLE.text, encoding="utf-8")
    return tmp_path


def read(*words: str) -> Run:
    return load([*words], FAMILIES)


def faults(run: Run) -> list[str]:
    return [str(fault) for fault in run_checks(run, config_checks)]


def test_path_content_and_chunks_follow_from_the_file(folder: Path) -> None:
    run = read(*WORDS, "--pipeline.schedule", "my.schedule")
    assert run.pipeline.schedule == str(folder / "my.schedule")
    assert run.pipeline.table == table_lines(TABLE)
    assert run.pipeline.chunks == 2
    assert faults(run) == []
    assert plan_of(run).table == TABLE


def test_the_config_of_a_run_and_its_plan_need_no_file(folder: Path) -> None:
    run = read(*WORDS, "--pipeline.schedule", "my.schedule")
    (folder / "run.toml").write_text(dump(run), encoding="utf-8")
    (folder / "my.schedule").unlink()
    again = read("run.toml")
    assert again == run
    text = plan_of(again).to_json()
    assert Plan.from_json(text).table == TABLE
    assert faults(again) == []


def test_the_digest_of_a_plan_depends_on_the_content(folder: Path) -> None:
    first = plan_of(read(*WORDS, "--pipeline.schedule", "my.schedule"))
    other = make_table("dual_pipe_v", ranks=2, microbatches=3)
    (folder / "my.schedule").write_text(other.text, encoding="utf-8")
    digest = plan_of(read(*WORDS, "--pipeline.schedule", "my.schedule")).digest
    assert digest != first.digest


def test_a_flag_replaces_the_stored_content(folder: Path) -> None:
    run = read(*WORDS, "--pipeline.schedule", "my.schedule")
    (folder / "run.toml").write_text(dump(run), encoding="utf-8")
    plain = read("run.toml", "--pipeline.schedule", "zero_bubble", "--pipeline.chunks", "1")
    assert plain.pipeline.table == ()
    assert faults(plain) == []
    other = make_table("zero_bubble", ranks=2, microbatches=3)
    (folder / "other.schedule").write_text(other.text, encoding="utf-8")
    words = ("run.toml", "--pipeline.schedule", "other.schedule", "--pipeline.chunks", "1")
    assert plan_of(read(*words)).table == other


def test_content_without_a_file_is_rejected(folder: Path) -> None:
    (folder / "bad.toml").write_text('[pipeline]\ntable = ["microbatches 1"]\n', encoding="utf-8")
    (fault,) = try_load(["bad.toml"], FAMILIES).faults
    assert str(fault).startswith("pipeline.table: is set, and pipeline.schedule is not set")


def test_a_missing_file_is_named_once(folder: Path) -> None:
    run = read(*WORDS, "--pipeline.schedule", "nowhere.schedule")
    (line,) = faults(run)
    assert "no schedule or table file" in line


def test_other_sizes_come_with_those_that_work(folder: Path) -> None:
    run = read("--mesh", "pp2", "--pipeline.schedule", "my.schedule", "--batch.global_size", "8")
    (line,) = faults(run)
    assert "got 2 ranks and 4 micro-batches; need 2 ranks and 3 micro-batches" in line
    assert "Fix: --batch.global_size 6" in line


def test_a_proof_at_reduced_size_keeps_the_table_and_a_smaller_case_drops_it(folder: Path) -> None:
    run = read(*WORDS, "--pipeline.schedule", "my.schedule")
    assert plan_of(reduced(run, accepts_sizes)).table == TABLE
    assert ("pipeline.schedule", "1f1b") in DEFAULTS
    plain = run.with_values({"pipeline.schedule": "1f1b", "pipeline.chunks": 1})
    assert plan_of(plain).table == make_table("1f1b", ranks=2, microbatches=3)


def test_the_command_of_a_proof_has_the_content_of_the_file(folder: Path) -> None:
    run = read(*WORDS, "--pipeline.schedule", "my.schedule")
    (folder / "my.schedule").unlink()
    _, _, words = command_of(run, FAMILIES, steps=1).partition("--first 1 ")
    pipeline = read(*shlex.split(words)).pipeline
    assert pipeline == run.pipeline
