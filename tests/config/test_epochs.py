"""`epochs`: the length of a run as often as its data is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_run import TINY, write_text
from weft.config import toml
from weft.config.run import Run
from weft.data.dataset import open_data
from weft.errors import UserError
from weft.start.checked_run import load_checked_run


def run_of(folder: Path, *words: str) -> Run:
    return load_checked_run([*TINY, "--data.source", str(write_text(folder)), *words])


@pytest.mark.parametrize(("epochs", "steps"), [("1", 563), ("0.5", 282), ("2", 1125), ("1e-6", 1)])
def test_epochs_are_steps_rounded_up(epochs: str, steps: int, tmp_path: Path) -> None:
    run = run_of(tmp_path, "--epochs", epochs)
    samples = open_data(run.data, run.model).num_samples
    assert samples == 2249
    assert (run.steps - 1) * run.batch.global_size < max(1, float(epochs) * samples)
    assert run.steps * run.batch.global_size >= float(epochs) * samples
    assert (run.steps, run.epochs) == (steps, None)


def test_flags_win_over_the_length_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "steps.toml").write_text("steps = 7\n")
    (tmp_path / "epochs.toml").write_text("epochs = 2.0\n")
    assert run_of(tmp_path, str(tmp_path / "steps.toml"), "--epochs", "1").steps == 563
    assert run_of(tmp_path, str(tmp_path / "epochs.toml")).steps == 1125
    assert run_of(tmp_path, str(tmp_path / "epochs.toml"), "--steps", "7").steps == 7


def test_a_stored_run_has_its_steps(tmp_path: Path) -> None:
    stored = tmp_path / "run.toml"
    stored.write_text(toml.dump(run_of(tmp_path, "--epochs", "1")))
    assert load_checked_run([str(stored)]).steps == 563
    assert load_checked_run([str(stored), "--epochs", "2"]).steps == 1125


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--epochs 1 --steps 3", "epochs: says the length of the run, and so does steps"),
        ("--epochs 0", "epochs: out of range"),
        ("--epochs 1 --optim.lrr 1", "optim.lrr: unknown key"),
    ],
)
def test_a_wrong_length_is_one_line(words: str, line: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run_of(tmp_path, *words.split())
    (fault,) = caught.value.faults
    assert str(fault).startswith(line)
