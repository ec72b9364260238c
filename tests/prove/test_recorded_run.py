"""Recorded runs are compared with the reference, within bounds that grow with the spread of perturbed runs."""

from __future__ import annotations

import json

import pytest

from tests.tiny_run import TINY
from weft.cli import main


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
