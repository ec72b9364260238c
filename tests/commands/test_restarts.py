"""Restarts under an agent: from the newest checkpoint, on the ranks that are left, without checks that a restart must pass."""

from __future__ import annotations

import pytest

from tests.tiny_run import TINY
from weft.cli import main
from weft.config.load import load
from weft.errors import EXIT_OK, EXIT_USER
from weft.models import FAMILIES
from weft.start.environment import launcher_notes
from weft.start.preflight import after_restart
from weft.start.run_folder import mark_job

WORLD = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_RANK": "0"}


@pytest.fixture
def out(tmp_path, monkeypatch):
    """A run folder with a checkpoint, made by a fresh start."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    words = ("--data.source", "text.txt", "--steps", "1", "--out", "x")
    assert main(["train", *TINY, *words]) == EXIT_OK
    return tmp_path / "x"


def adapted(*words: str, out="x"):
    argv = [*TINY, "--out", str(out), *words]
    return after_restart(load(argv, FAMILIES))


def set_world(monkeypatch, size: int, **variables: str) -> None:
    for name, value in {**WORLD, "WORLD_SIZE": str(size), **variables}.items():
        monkeypatch.setenv(name, value)


def test_a_fresh_start_stays_one(out, monkeypatch):
    assert adapted().resume is None
    set_world(monkeypatch, 1, TORCHELASTIC_RESTART_COUNT="0")
    assert adapted().resume is None


@pytest.mark.parametrize("variable", ["TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"])
def test_a_restart_resumes_from_the_newest_checkpoint_of_its_own_folder(out, monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert adapted().resume == "auto"
    assert adapted("--resume", "other/ckpt/step-000005").resume == "auto"
    assert adapted("--resume", "other/run", out="new").resume == "other/run"


def test_the_folder_of_an_elastic_run_names_its_job(out, monkeypatch):
    elastic = ("--run.elastic", "True")
    set_world(monkeypatch, 1, TORCHELASTIC_RUN_ID="job7")
    assert adapted(*elastic).resume is None
    mark_job(out, {"RANK": "0", "TORCHELASTIC_RUN_ID": "job7"})
    assert adapted(*elastic).resume == "auto"
    assert adapted().resume is None
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job8")
    assert adapted(*elastic).resume is None


def test_an_elastic_run_shrinks_to_its_ranks_and_returns_to_its_mesh(monkeypatch):
    words = ("--mesh", "dp4", "--run.elastic", "True")
    set_world(monkeypatch, 2)
    small = adapted(*words)
    assert small.mesh == "dp2"
    assert small.run.full_mesh == "dp4"
    set_world(monkeypatch, 4)
    again = adapted("--mesh", "dp2", "--run.elastic", "True", "--run.full_mesh", "dp4")
    assert again.mesh == "dp4"
    assert again.run.full_mesh == ""
    assert small.batch == again.batch


def test_an_elastic_run_whose_full_mesh_is_impossible_is_rejected_on_any_number_of_ranks(
    tmp_path, capsys
):
    words = ("--mesh", "dp4", "--nproc", "2", "--run.elastic", "True", "--batch.global_size", "4")
    words = (*words, "--batch.micro_size", "2")  # as many as dp2 takes
    assert main(["train", *TINY, *words, "--out", str(tmp_path / "new")]) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: batch.global_size: does not divide into micro-batches (got 4; ")


def test_without_elastic_fewer_ranks_are_rejected_in_a_line_that_names_the_key(monkeypatch, capsys):
    set_world(monkeypatch, 2)
    assert main(["train", "--mesh", "dp4"]) == EXIT_USER
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: mesh: differs from the world size (got 2 ranks started; need 4 ")
    assert line.endswith("or --run.elastic True for the best smaller layout")


@pytest.mark.parametrize("transport", ["process", "threads"])
def test_elastic_local_ranks_are_as_many_as_nproc(transport):
    words = ("--mesh", "dp4", "--nproc", "2", "--run.elastic", "True", "--transport", transport)
    small = adapted(*words)
    assert small.mesh == "dp2"
    assert small.run.full_mesh == "dp4"
    assert small.transport == transport


def test_restarts_that_the_agent_does_not_make_are_noted(monkeypatch):
    def notes(restarts: int | None) -> list[str]:
        return list(launcher_notes(None, None, restarts=restarts))

    assert notes(7) == []
    set_world(monkeypatch, 2, TORCHELASTIC_MAX_RESTARTS="2")
    assert notes(None) == notes(2) == []
    (note,) = notes(7)
    assert note.startswith(
        "run.restarts 7 is not used: the launcher of the ranks starts them again 2 "
    )
    monkeypatch.setenv("WEFT_JOB", "slurm x")
    assert notes(7) == []
