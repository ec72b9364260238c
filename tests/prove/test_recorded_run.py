"""Recorded runs are compared with the reference, within bounds that grow with the spread of perturbed runs."""

from __future__ import annotations

import json
import math

import pytest

from tests.tiny_run import TINY
from weft.cli import main
from weft.prove import reference
from weft.prove.recorded_run import relative_difference
from weft.train import loss_scale


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["train", *TINY, "--mesh", "dp2", "--steps", "12", "--optim.lr", "0.03"]
    assert main([*words, "--optim.warmup", "2", "--out", str(folder)]) == 0
    return folder


def test_a_healthy_float32_run_is_equal_at_every_step(out, capsys):
    assert main(["prove", str(out), "--first", "12", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "equal"
    assert report["compared"] == 24


def test_a_wrong_norm_is_not_equal(out, tmp_path, capsys):
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("run.toml", "events.jsonl"):
        text = (out / name).read_text()
        if name == "events.jsonl":
            lines = []
            for line in text.splitlines():
                event = json.loads(line)
                if event["event"] == "step" and event["step"] == 2:
                    event["grad_norm"] *= 1.001
                lines.append(json.dumps(event))
            text = "\n".join(lines) + "\n"
        (copy / name).write_text(text)
    assert main(["prove", str(copy), "--first", "4"]) == 1
    printed = capsys.readouterr().out
    assert "norm of step 2: gradient norm" in printed
    assert "1.001 times the right value" in printed


def test_steps_whose_float16_gradients_overflowed_are_equal(tmp_path, monkeypatch, capsys):
    """Their norm is not finite on either side; what one side alone skips is not compared with what
    the other one updates.
    """
    monkeypatch.setattr(loss_scale, "START", 2.0**22)
    monkeypatch.setattr(reference, "FIRST_SCALE", 2.0**20)
    words = ["train", *TINY, "--mesh", "dp2", "--precision.compute", "float16", "--steps", "7"]
    out = tmp_path / "run"
    assert main([*words, "--prove.before", "never", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "step 1 skipped: float16 gradients overflow at loss scale 4,194,304;" in printed
    assert "\nstep 7 skipped" not in printed
    assert main(["prove", str(out), "--first", "7", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "equal"


@pytest.mark.parametrize(
    ("actual", "expected", "right"),
    [
        (1.5, 1.0, 0.5),
        (math.inf, math.inf, 0.0),
        (math.inf, math.nan, 0.0),
        (1.0, math.inf, math.inf),
        (math.nan, 1.0, math.inf),
    ],
)
def test_one_number_that_is_not_finite_is_infinitely_far_from_one_that_is(actual, expected, right):
    assert relative_difference(actual, expected) == right
