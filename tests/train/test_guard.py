"""Guards of training steps: skip, rollback and spikes; a run without the left-out samples equals one device without them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.spoiled_runs import (
    MARKER,
    TOLERANCE,
    assert_losses,
    bad_batch,
    events_of,
    one_device_losses,
    run_of,
    spoil,
    words_of,
    write_text,
)
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.checkpoint.manifest import read_manifest
from weft.cli import main
from weft.data.dataset import open_data
from weft.data.order import batch_of_step
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER
from weft.train.event_lines import step_history
from weft.train.guard import spike_bound
from weft.train.guard_records import WINDOW, GuardState, left_out_batches, read_records

LAYOUTS = {
    "one rank": (),
    "dp2 tp2, ZeRO 1": ("--mesh", "dp2 tp2", "--parallel.zero", "1"),
    "pp2 dp2, ZeRO 3": ("--mesh", "pp2 dp2", "--parallel.zero", "3"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


@given(st.lists(st.integers(0, 60), unique=True, max_size=12), st.integers(0, 40))
def test_step_k_trains_on_the_kth_batch_that_is_not_left_out(
    numbers: list[int], num_steps: int
) -> None:
    skipped = sorted(numbers)
    left = [number for number in range(120) if number not in skipped]
    chosen = [batch_of_step(step, skipped) for step in range(num_steps)]
    assert chosen == left[:num_steps]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rolled_back_run_equals_one_device_without_the_samples_also_after_a_resume(
    layout: str, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(text)
    bad = bad_batch(run)
    spoil(monkeypatch, "layer1", torch.nan)
    out = tmp_path / "run"
    keys = ("--guard.nonfinite", "rollback", "--save.every", "2")
    steps = ("--steps", str(bad + 2))
    actual = main(["train", *words_of(text, out, *keys, *steps, *LAYOUTS[layout])])
    assert actual == EXIT_OK
    resumed = ("--steps", str(bad + 4), "--resume", "auto", "--mesh", "tp2")
    actual = main(["train", *words_of(text, out, *keys, *resumed)])
    assert actual == EXIT_OK
    numbers = [number for number in range(bad + 5) if number != bad]
    assert_losses(out, one_device_losses(run, numbers))
    guards = [event for event in events_of(out) if event["event"] == "guard"]
    assert [(event["step"], event["batch"], event["action"]) for event in guards] == [
        (bad + 1, bad, "rollback")
    ]
    manifest = read_manifest(checkpoint_path(out, bad + 4))
    assert manifest.facts.position == {
        "steps": bad + 4,
        "samples": (bad + 5) * run.batch.global_size,
        "skipped_batches": [bad],
    }


def test_the_record_of_a_failed_step_names_the_samples_with_the_bad_value(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_of(text)
    bad = bad_batch(run)
    spoil(monkeypatch, "layer1", torch.nan)
    out = tmp_path / "run"
    steps = ("--steps", str(bad + 1), "--mesh", "dp2", "--save.every", "1")
    argv = ["train", *words_of(text, out, *steps)]
    assert main(argv) == EXIT_FAILED
    (record,) = read_records(out)
    samples = open_data(run.data, run.model)
    marked = [
        sample
        for sample in record["samples"]
        if MARKER in samples.read(torch.tensor([sample]).numpy()).inputs
    ]
    assert record["suspects"] == marked
    actual = record["places"][0]["tokens"][0]
    assert actual == marked[0] * run.data.seq_len
    assert record["step"] == bad + 1
    assert record["batch"] == bad
    assert record["action"] == "stop"
    assert record["value"]["block"] == "layer1"
    names = " ".join(map(str, marked))
    message = capsys.readouterr().err
    assert f"step {bad + 1}: the loss is nan and the gradient norm is nan; first in" in message
    assert f"samples {names}" in message or f"sample {names}" in message
    assert f"weft replay {out} --step {bad + 1}" in message
    assert next(checkpoints(out))[0] == bad


def test_skip_leaves_out_the_update_alone(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(text)
    bad = bad_batch(run)
    spoil(monkeypatch, "layer1", torch.nan)
    out = tmp_path / "run"
    keys = ("--guard.nonfinite", "skip", "--mesh", "dp2", "--steps", str(bad + 3))
    argv = ["train", *words_of(text, out, *keys)]
    assert main(argv) == EXIT_OK
    steps = step_history(events_of(out))
    actual = [event["step"] for event in steps if event["skipped"]]
    assert actual == [bad + 1]
    numbers = [number for number in range(bad + 3) if number != bad]
    accepted = [event["loss"] for event in steps if not event["skipped"]]
    assert accepted == pytest.approx(one_device_losses(run, numbers), rel=TOLERANCE)


@pytest.mark.parametrize("action", ["skip", "rollback"])
def test_a_run_that_fails_again_and_again_stops_and_saves_nothing_bad(
    action: str,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(monkeypatch, "layer0", torch.inf, token=ord(" "))
    out = tmp_path / "run"
    keys = ("--guard.nonfinite", action, "--guard.max_failures", "3", "--mesh", "dp2")
    argv = ["train", *words_of(text, out, *keys)]
    assert main(argv) == EXIT_FAILED
    guards = [event for event in events_of(out) if event["event"] == "guard"]
    actual = [event["action"] for event in guards]
    assert actual == [action] * 3 + ["stop"]
    assert "3 failed before it in a row" in capsys.readouterr().err
    actual = [step for step, _ in checkpoints(out)]
    assert actual == ([0] if action == "rollback" else [])
    assert events_of(out)[-1]["status"] == "failed"


def test_a_spike_is_reported_and_training_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bad_batch(run_of(text))
    spoil(monkeypatch, "loss", 100.0)
    out = tmp_path / "run"
    keys = ("--guard.spike", "3", "--mesh", "dp2", "--steps", str(bad + 3))
    argv = ["train", *words_of(text, out, *keys)]
    assert main(argv) == EXIT_OK
    (guard,) = [event for event in events_of(out) if event["event"] == "guard"]
    assert guard["kind"] == "spike"
    assert guard["action"] == "report"
    assert guard["step"] == bad + 1
    assert f"guard: step {bad + 1}: the loss is" in capsys.readouterr().out


def test_a_rollback_from_a_spike_leaves_out_all_batches_since_the_checkpoint(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(text)
    bad = bad_batch(run)
    spoil(monkeypatch, "loss", 100.0)
    out = tmp_path / "run"
    every = bad - 1
    keys = ("--guard.spike", "3", "--guard.on_spike", "rollback", "--save.every", str(every))
    steps = ("--mesh", "pp2", "--steps", str(every + 3))
    actual = main(["train", *words_of(text, out, *keys, *steps)])
    assert actual == EXIT_OK
    left_out = {every, bad}
    numbers = [number for number in range(every + 5) if number not in left_out]
    assert_losses(out, one_device_losses(run, numbers))
    (record,) = read_records(out)
    assert record["left_out"] == sorted(left_out)
    assert record["start_step"] == every


@given(st.floats(-1e6, 1e6), st.floats(1.01, 100.0))
def test_a_loss_at_the_median_is_no_spike_whatever_its_sign(median: float, factor: float) -> None:
    bound = spike_bound(median, factor=factor)
    assert median <= bound
    assert bound <= factor * abs(median) or median == 0
    if median > 0:
        assert bound == factor * median


def test_spikes_need_a_factor_above_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--guard.spike", "0.5"]) == EXIT_USER
    assert "error: guard.spike: every loss would be a spike" in capsys.readouterr().err
    assert main(["train", "--guard.on_spike", "rollback"]) == EXIT_USER
    assert "error: guard.on_spike: no loss counts as a spike" in capsys.readouterr().err


def test_the_state_of_guards_survives_a_checkpoint() -> None:
    state = GuardState(
        skipped_batches=(3, 9), losses=tuple(float(number) for number in range(WINDOW)), failures=2
    )
    position = state.position(12, global_size=4)
    assert position["samples"] == 14 * 4
    assert GuardState.of_position(json.loads(json.dumps(position))) == state
    assert GuardState().position(5, global_size=4) == {"steps": 5, "samples": 20}


def test_a_resume_reads_left_out_batches_after_its_checkpoint_and_no_earlier_ones() -> None:
    records = [{"batch": 4, "left_out": [3, 4]}, {"batch": 9, "left_out": [9]}, {"batch": 11}]
    assert left_out_batches(records, first=4) == (4, 9)


def test_damaged_records_are_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "guard"
    folder.mkdir()
    (folder / "step-000001.json").write_text("{")
    (folder / "step-000002.json").write_text("[" * 100_000)
    (folder / "step-000003.json").write_text('{"step": 3, "batch": 2, "left_out": [2]}\n')
    (folder / "step-000004.json").write_text('{"step": 3, "batch": 2, "left_out": 2}\n')
    assert [record["batch"] for record in read_records(tmp_path)] == [2]
