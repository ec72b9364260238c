"""`weft replay`: one step of a recorded run repeated on one device or another layout, and compared with the record."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.spoiled_runs import bad_batch, run_of, spoil, words_of, write_text
from weft.cli import main
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def replay(
    capsys: pytest.CaptureFixture[str], out: Path, *words: str, code: int = EXIT_OK
) -> list[str]:
    """Lines that the command prints."""
    capsys.readouterr()
    argv = ["replay", str(out), *words]
    assert main(argv) == code
    return capsys.readouterr().out.splitlines()


def test_a_failed_step_is_repeated_with_its_block_and_samples(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bad_batch(run_of(text))
    out = tmp_path / "run"
    keys = (
        "--guard.nonfinite",
        "rollback",
        "--mesh",
        "dp2",
        "--save.every",
        "2",
        "--save.keep",
        "9",
    )
    with monkeypatch.context() as patch:
        spoil(patch, "layer1", torch.nan)
        actual = main(["train", *words_of(text, out, *keys, "--steps", str(bad + 3))])
        assert actual == EXIT_OK
        lines = replay(capsys, out)
    assert lines[0].startswith(
        f"{out}: step {bad + 1} repeated on one device, from {out}/ckpt/step-"
    )
    assert "first in the output of block 'layer1' on rank 0; sample" in "\n".join(lines)
    assert f"of {text}" not in lines
    samples = [line for line in lines if line.startswith("  sample ")]
    assert any(f"source {text}" in line for line in samples)
    assert lines[-1] == "not finite here either"
    lines = replay(capsys, out, code=EXIT_FAILED)  # without the fault
    assert lines[-1].startswith("finite here: ")
    after = ("--step", str(bad + 2), "--layout", "tp2")
    lines = replay(capsys, out, *after)
    assert "repeated on tp2, ranks as threads" in lines[0]
    assert "equal within 1e-09 (float64 rounding)" in lines[-1]


def test_a_failed_step_is_repeated_with_the_rates_and_checkpoints_of_its_time(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    keys = [
        "--optim.warmup",
        "0",
        "--optim.clip",
        "0",
        "--save.every",
        "1",
        "--save.keep",
        "9",
        "--steps",
        "5",
    ]
    failing = ("--guard.nonfinite", "rollback", "--guard.max_failures", "1", "--save.every", "9")
    assert (
        main(["train", *words_of(text, out, *keys, *failing, "--optim.lr", "1e200")]) == EXIT_FAILED
    )
    again = ("--resume", str(out / "ckpt" / "step-000000"), "--optim.lr", "1e-3")
    assert main(["train", *words_of(text, out, *keys, *again)]) == EXIT_OK
    lines = replay(capsys, out)
    assert "step 2 repeated on one device, from " in lines[0]
    assert lines[-1] == "not finite here either"
    lines = replay(capsys, out, "--step", "4")
    assert "; equal within" in lines[-1]


def test_steps_after_a_skipped_update_are_repeated_from_the_initial_parameters(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bad_batch(run_of(text))
    out = tmp_path / "run"
    keys = ("--guard.nonfinite", "skip", "--mesh", "dp2", "--save.at_end", "False")
    with monkeypatch.context() as patch:
        spoil(patch, "layer1", torch.nan)
        actual = main(["train", *words_of(text, out, *keys, "--steps", str(bad + 2))])
        assert actual == EXIT_OK
    lines = replay(capsys, out, "--step", str(bad + 2))
    assert f"from the initial parameters (steps 1 to {bad + 1} first)" in lines[0]
    assert "; equal within" in lines[-1]


def test_a_spike_is_repeated_on_the_batches_of_its_time(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bad_batch(run_of(text))
    out = tmp_path / "run"
    keys = ("--guard.spike", "3", "--guard.on_spike", "rollback", "--save.every", str(bad - 2))
    spoil(monkeypatch, "loss", 100.0)
    actual = main(["train", *words_of(text, out, *keys, "--steps", str(bad + 1))])
    assert actual == EXIT_OK
    lines = replay(capsys, out)
    assert f"step {bad + 1} repeated" in lines[0]
    assert "; equal within" in lines[-1]
    lines = replay(capsys, out, "--step", str(bad))  # trained again on other batches
    assert "; equal within" in lines[-1]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            (),
            "error: weft replay: takes one run folder (got nothing). Fix: weft replay runs/x --step 8",
        ),
        (("nix",), "error: weft replay: no run in this folder (got 'nix' without run.toml)"),
        (("nix", "--step", "-1"), "error: step: "),
    ],
)
def test_bad_input_is_one_line(
    words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["replay", *words]) == EXIT_USER
    assert capsys.readouterr().err.startswith(line)


def test_a_step_that_was_not_trained_is_rejected(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    argv = ["train", *words_of(text, out, "--steps", "2")]
    assert main(argv) == EXIT_OK
    assert main(["replay", str(out), "--step", "3"]) == EXIT_USER
    assert f"error: step: {out} has no record of it (got step 3; need 1 to 2)" in (
        capsys.readouterr().err
    )
    assert main(["replay", str(out), "--layout", "dp3"]) == EXIT_USER
    assert "error: batch.global_size" in capsys.readouterr().err
