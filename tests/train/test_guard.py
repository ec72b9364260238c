"""Guards of training steps: skip, rollback and spikes; a run without the left-out samples equals one device without them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.tiny_run import TINY
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.checkpoint.manifest import read_manifest
from weft.cli import main
from weft.config.load import load
from weft.config.run import Run
from weft.data.dataset import open_data
from weft.data.order import batch_of_step
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER
from weft.models import FAMILIES
from weft.models.common.batch import Batch
from weft.prove.oracle import one_device
from weft.train import build
from weft.train.data_loader import samples_of, whole_batch
from weft.train.event_log import EVENTS, read_events, step_history
from weft.train.guard import (
    WINDOW,
    GuardState,
    left_out_batches,
    read_records,
)
from weft.train.optim import make_optimizer

MARKER = 7
"""The byte of one sample that makes a block return NaN, or a loss that is far too large."""
LR = 3e-3
TOLERANCE = 1e-9
KEYS = (
    *TINY,
    *("--optim.warmup", "0", "--optim.decay", "constant", "--optim.lr", str(LR)),
    *("--precision.params", "float64", "--precision.compute", "float64"),
    *("--precision.reduce", "float64"),
)
LAYOUTS = {
    "one rank": (),
    "dp2 tp2, ZeRO 1": ("--mesh", "dp2 tp2", "--parallel.zero", "1"),
    "pp2 dp2, ZeRO 3": ("--mesh", "pp2 dp2", "--parallel.zero", "3"),
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    sentences = [f"the quick brown fox jumps over {number} lazy dogs. " for number in range(60)]
    sentences[31] = chr(MARKER) * 4 + sentences[31]
    path.write_text("".join(sentences))
    return path


def words_of(text: Path, out: Path, *words: str) -> list[str]:
    return [*KEYS, "--data.source", str(text), "--out", str(out), *words]


def events_of(out: Path) -> list[dict[str, Any]]:
    return list(read_events(out / EVENTS))


def run_of(text: Path, *words: str) -> Run:
    return load(words_of(text, Path("unused"), *words), FAMILIES)


def whole_batches(run: Run, numbers: Sequence[int]) -> list[Batch]:
    samples = open_data(run.data, run.model)
    batches = []
    for number in numbers:
        chosen = samples_of(samples, number, global_size=run.batch.global_size, seed=run.seed)
        batches.append(whole_batch(samples, chosen, later=False))
    return batches


def bad_batch(run: Run) -> int:
    """Number of the first batch with the marker."""
    for number, batch in enumerate(whole_batches(run, range(200))):
        if (batch.inputs == MARKER).any():
            return number
    raise AssertionError("no batch holds the marker")


def one_device_losses(run: Run, numbers: Sequence[int]) -> list[float]:
    """Losses of one device that trains on these batches."""
    traces = one_device(
        FAMILIES[run.model.name],
        run.model,
        whole_batches(run, numbers),
        seed=run.seed,
        dtype=torch.float64,
        optimizer=lambda params, names: make_optimizer(params, run.optim, decay_names=names),
        clip=run.optim.clip,
        lr=LR,
    )
    return [trace.loss for trace in traces]


def spoil(monkeypatch: pytest.MonkeyPatch, block: str, factor: float, token: int = MARKER) -> None:
    """Multiply what `block` returns for micro-batches with `token`, in every run from here on."""
    build_step = build.build_step

    def hook(_module: nn.Module, args: tuple[Tensor, Batch], output: Tensor) -> Tensor:
        has_token = bool((args[1].inputs == token).any())
        return output * factor if has_token else output

    def spoiled(*args: Any) -> Any:
        step = build_step(*args)
        if block in step.model.blocks:
            step.model.blocks[block].register_forward_hook(hook)
        return step

    monkeypatch.setattr(build, "build_step", spoiled)


def assert_losses(out: Path, expected: Sequence[float]) -> None:
    losses = [event["loss"] for event in step_history(events_of(out))]
    assert losses == pytest.approx(expected, rel=TOLERANCE)


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
    assert main(["train", *words_of(text, out, *keys, *steps, *LAYOUTS[layout])]) == EXIT_OK
    resumed = ("--steps", str(bad + 4), "--resume", "auto", "--mesh", "tp2")
    assert main(["train", *words_of(text, out, *keys, *resumed)]) == EXIT_OK
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
    assert main(["train", *words_of(text, out, *steps)]) == EXIT_FAILED
    (record,) = read_records(out)
    samples = open_data(run.data, run.model)
    marked = [
        sample
        for sample in record["samples"]
        if MARKER in samples.read(torch.tensor([sample]).numpy()).inputs
    ]
    assert record["suspects"] == marked
    assert record["places"][0]["tokens"][0] == marked[0] * run.data.seq_len
    assert (record["step"], record["batch"], record["action"]) == (bad + 1, bad, "stop")
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
    assert main(["train", *words_of(text, out, *keys)]) == EXIT_OK
    steps = step_history(events_of(out))
    assert [event["step"] for event in steps if event["skipped"]] == [bad + 1]
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
    assert main(["train", *words_of(text, out, *keys)]) == EXIT_FAILED
    guards = [event for event in events_of(out) if event["event"] == "guard"]
    assert [event["action"] for event in guards] == [action] * 3 + ["stop"]
    assert "3 failed before it in a row" in capsys.readouterr().err
    assert [step for step, _ in checkpoints(out)] == ([0] if action == "rollback" else [])
    assert events_of(out)[-1]["status"] == "failed"


def test_a_spike_is_reported_and_training_goes_on(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = bad_batch(run_of(text))
    spoil(monkeypatch, "loss", 100.0)
    out = tmp_path / "run"
    keys = ("--guard.spike", "3", "--mesh", "dp2", "--steps", str(bad + 3))
    assert main(["train", *words_of(text, out, *keys)]) == EXIT_OK
    (guard,) = [event for event in events_of(out) if event["event"] == "guard"]
    assert (guard["kind"], guard["action"], guard["step"]) == ("spike", "report", bad + 1)
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
    assert main(["train", *words_of(text, out, *keys, *steps)]) == EXIT_OK
    left_out = {every, bad}
    numbers = [number for number in range(every + 5) if number not in left_out]
    assert_losses(out, one_device_losses(run, numbers))
    (record,) = read_records(out)
    assert record["left_out"] == sorted(left_out)
    assert record["start_step"] == every


def test_spikes_need_a_factor_above_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--guard.spike", "0.5"]) == EXIT_USER
    assert "error: guard.spike: every loss would be a spike" in capsys.readouterr().err


def test_the_state_of_guards_survives_a_checkpoint() -> None:
    state = GuardState((3, 9), tuple(float(number) for number in range(WINDOW)), 2)
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
    (folder / "step-000003.json").write_text('{"batch": 2, "left_out": [2]}')
    assert [record["batch"] for record in read_records(tmp_path)] == [2]
