"""`weft sweep` with real runs: all are checked first, a failed one is named, finished ones are skipped, the best stands first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest

from tests.programs import WEFT, programs
from tests.tiny_run import TINY, write_text
from weft.cli import main
from weft.commands.sweep_runs import PlannedRun
from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER

POLL_S = 0.05


def words_of(folder: Path, *more: str) -> list[str]:
    """A sweep of tiny runs, in `folder/sweep`."""
    text = write_text(folder)
    out = str(folder / "sweep")
    return ["sweep", *TINY, "--data.source", str(text), "--out", out, *more]


@pytest.fixture
def forked_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are processes of their own that have imported torch already; those of the tests with
    signals start as for a user.
    """

    def train(run: PlannedRun, output: TextIO, stop: object) -> int:
        done = programs().run(WEFT, "train", *run.words)
        output.write(done.stdout)
        return done.returncode

    monkeypatch.setattr("weft.commands.sweep_runs._train", train)


def events_of(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("forked_runs")
def test_runs_are_trained_compared_and_resumed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    evaluated = ("--eval.every", "2", "--eval.source", str(tmp_path / "text.txt"))
    grid = ("--optim.lr", "1e-4", "1e30", "1e-2", "--optim.warmup", "0", "--steps", "2")
    words = words_of(tmp_path, *grid, *evaluated, "--eval.batches", "1")
    assert main(words) == EXIT_FAILED
    out, err = capfd.readouterr()
    assert "error: the run lr=1e30 failed with exit code 1" in err
    assert "1 run failed: lr=1e30; try again: weft sweep" in err
    rows = [line.split() for line in out.partition("\nlr ")[2].splitlines()]
    assert [row[:3] for row in rows[1:4]] == [
        ["1e-2", "done", "2"],
        ["1e-4", "done", "2"],
        ["1e30", "failed", "1"],
    ]
    page = (tmp_path / "sweep" / "report.html").read_text()
    assert all(f"lr={value}" in page for value in ("1e-4", "1e30", "1e-2"))
    finished = tmp_path / "sweep" / "lr=1e-4"
    before = (finished / "events.jsonl").read_bytes()
    (finished / "ckpt").rename(tmp_path / "moved")  # so that nothing could be resumed
    assert main([*words, "--json"]) == EXIT_FAILED
    out, err = capfd.readouterr()
    assert "run 1 of 3: lr=1e-4 is finished already" in err
    assert (finished / "events.jsonl").read_bytes() == before
    found = json.loads(out)
    assert [run["name"] for run in found["runs"]] == ["lr=1e-2", "lr=1e-4", "lr=1e30"]
    last = next(event for event in reversed(events_of(finished)) if event["event"] == "eval")
    assert found["runs"][1]["evaluation_loss"] == last["loss"]
    assert found["runs"][1]["values"] == {"optim.lr": "1e-4"}


def test_every_run_is_checked_before_the_first_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    grid = ("--mesh", "dp2", "--mesh", "dp3", "--optim.lr", "1e-3", "1e-2", "--steps", "0")
    assert main(words_of(tmp_path, *grid)) == EXIT_USER
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("error: steps: out of range (got 0")
    assert lines[1].startswith("error: batch.global_size: ")
    assert ", in the run mesh=dp3,lr=1e-3 and 1 more" in lines[1]
    assert not (tmp_path / "sweep").exists()


def test_another_sweep_in_the_same_folder_is_rejected_and_more_steps_are_not(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "weft.commands.sweep_runs._train", lambda run, output, stop: main(["train", *run.words])
    )  # without a process of its own: ranks are threads
    grid = ("--seed", "1", "2")
    assert main(words_of(tmp_path, *grid, "--steps", "1")) == EXIT_OK
    capfd.readouterr()
    words = words_of(tmp_path, *grid, "--steps", "1", "--optim.lr", "1e-5")
    assert main(words) == EXIT_USER
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert "holds a run of another sweep" in lines[0]
    assert "has optim.lr 0.003" in lines[0]
    assert main(words_of(tmp_path, *grid, "--steps", "2")) == EXIT_OK
    for seed in (1, 2):
        events = events_of(tmp_path / "sweep" / f"seed={seed}")
        assert [event["step"] for event in events if event["event"] == "step"] == [1, 2]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, EXIT_PREEMPTED), (signal.SIGINT, EXIT_INTERRUPTED)]
)
def test_a_stop_ends_the_run_under_way_and_starts_no_further_one(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """SIGTERM is sent to the sweep alone, Ctrl-C to its process group, as a terminal does."""
    words = words_of(tmp_path, "--seed", "1", "2", "--steps", "100000")
    events = tmp_path / "sweep" / "seed=1" / "events.jsonl"
    with programs().running(WEFT, *words) as program:
        while not (events.exists() and '"event":"step"' in events.read_text()):
            assert program.poll() is None
            time.sleep(POLL_S)
        if number == signal.SIGINT:
            os.killpg(program.pid, number)
        else:
            program.send_signal(number)
        _, err = program.communicate()
        assert program.wait() == code, err
    assert "go on: weft sweep --model.layers" in err
    assert not (tmp_path / "sweep" / "seed=2").exists()
    last = events_of(tmp_path / "sweep" / "seed=1")[-1]
    assert last["status"] == ("interrupted" if number == signal.SIGINT else "stopped")
    has_saved = (tmp_path / "sweep" / "seed=1" / "ckpt").exists()
    assert has_saved == (number == signal.SIGTERM)


def test_the_folder_follows_from_words_and_files(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    base, own = tmp_path / "base.toml", tmp_path / "own.toml"
    base.write_text("steps = 0\n")
    own.write_text('base = "base.toml"\n')
    folders = []
    monkeypatch.setattr(
        "weft.commands.sweep._checked_runs",
        lambda grid, folder, is_array: folders.append((folder, len(grid.points))) or [],
    )
    monkeypatch.setattr(
        "weft.commands.sweep.train_all", lambda planned, output, again, **options: 1
    )
    for text in ("steps = 0\n", "steps = 0\n", "steps = 1\n"):
        base.write_text(text)
        assert main(["sweep", "own.toml", "--seed", "1", "2"]) == 1
    (first, second, third) = folders
    assert first == second
    assert first != third
    assert first[0].parent == Path("runs")
    assert first[0].name.startswith("own-")
    assert first[1] == 2


SRUN = """#!/bin/sh
while [ "$1" != "-m" ]; do shift; done
exec "$PYTHON" "$@"
"""
"""Starts the ranks as Slurm does on one node: here it leaves that to weft."""


def array_words(folder: Path, *more: str) -> list[str]:
    words = words_of(folder, "--optim.lr", "1e-3", "1e-2", "--steps", "2", *more)
    words.remove("threads")
    words.remove("--transport")
    return [*words, "--array", "slurm", "--prove.before", "never"]


def put_program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.mark.timeout(240)
def test_the_tasks_of_a_job_array_are_the_runs(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch script runs with a stand-in for srun; tests/clusters has the real one."""
    put_program(tmp_path / "bin", "srun", SRUN)
    put_program(tmp_path / "bin", "sbatch", f"#!/bin/sh\necho $1 >> {tmp_path}/submitted\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHON", sys.executable)
    assert main(array_words(tmp_path)) == EXIT_OK
    script = tmp_path / "sweep" / "job" / "slurm.sh"
    assert (tmp_path / "submitted").read_text().split() == [str(script)]
    assert "#SBATCH --array=0-1\n" in script.read_text()
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "1"}
    subprocess.run(["bash", str(script)], env=environment, check=True, capture_output=True)
    done = tmp_path / "sweep" / "lr=1e-2"
    assert [event["step"] for event in events_of(done) if event["event"] == "step"] == [1, 2]
    assert not (tmp_path / "sweep" / "lr=1e-3" / "events.jsonl").exists()
    capfd.readouterr()
    assert main(array_words(tmp_path)) == EXIT_FAILED  # one of them has not begun
    out = capfd.readouterr().out
    assert "--array=0-0" in script.read_text()
    assert "lr=1e-3" in script.read_text()
    assert "lr=1e-2" not in script.read_text()
    rows = [line.split()[:2] for line in out.partition("\nlr ")[2].splitlines()]
    assert ["1e-2", "done"] in rows


def test_an_array_of_unequal_runs_is_rejected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    meshes = ("--mesh", "dp2", "--mesh", "dp4")
    assert main(array_words(tmp_path, *meshes)) == EXIT_USER
    line = "error: array: the runs have different numbers of ranks (got 2 (dp2), 4 (dp4))"
    assert capfd.readouterr().err.startswith(line)
    assert not (tmp_path / "sweep").exists()
