"""What `weft train` prints into a pipe: lines of the steps that are asked for, beside events of all steps."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.tiny_run import TINY, write_text
from weft.cli import main
from weft.errors import EXIT_OK


def test_lines_of_chosen_steps_and_events_of_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, out = write_text(tmp_path), tmp_path / "run"
    words = [*TINY, "--mesh", "dp2", "--data.source", str(text), "--out", str(out)]
    words += ["--steps", "12", "--log.every", "5", "--eval.every", "7", "--eval.source", str(text)]
    words += ["--eval.batches", "1"]
    assert main(["train", *words]) == EXIT_OK
    shown = capsys.readouterr().out
    assert re.findall(r"^step +(\d+)/12 ", shown, re.MULTILINE) == ["1", "5", "7", "10", "12"]
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [event["step"] for event in events if event["event"] == "step"] == list(range(1, 13))
    evaluation = next(event for event in events if event["event"] == "eval")
    line = next(line for line in shown.splitlines() if line.startswith("step 10/12"))
    assert f"evaluation {evaluation['loss']:.4f}  " in line
    assert re.search(r"  \d+:\d\d elapsed  \d+:\d\d left$", line)
