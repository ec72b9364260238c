"""Does it fit: the memory of the fullest rank beside what the run says that there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.report.test_report import add_events
from tests.tiny_run import TINY, write_text
from weft.cli import main
from weft.core.machine_memory import total_bytes
from weft.errors import EXIT_OK
from weft.report.figures import ReportAnswer, answers
from weft.report.recorded_values import RunRecord

GIB = 2**30


def answer(folder: Path, *, error: str = "", mem_bytes: int = GIB, **start: Any) -> ReportAnswer:
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text("")
    step = {"event": "step", "step": 1, "loss": 1.0, "grad_norm": 1.0, "tokens": 1, "step_s": 1.0}
    add_events(folder, {"event": "run", **start}, {**step, "mem_bytes": mem_bytes})
    if error:
        add_events(folder, {"event": "end", "status": "failed", "error": error})
    return answers(RunRecord.read(folder))[1]


@pytest.mark.parametrize(
    ("mem_bytes", "ranks", "text", "kind"),
    [
        (60 * GIB, 1, "yes: 75% of the memory", "good"),
        (79 * GIB, 1, "barely: 99% of the memory", "bad"),
        (10 * GIB, 2, "yes: at most 25% of the memory", "good"),
        (79 * GIB, 2, "at most 198% of the memory", "plain"),
    ],
)
def test_the_fullest_rank_is_compared_with_the_memory(
    mem_bytes: int, ranks: int, text: str, kind: str, tmp_path: Path
) -> None:
    found = answer(tmp_path, mem_bytes=mem_bytes, memory_bytes=80 * GIB, memory_ranks=ranks)
    assert (found.question, found.text, found.kind) == ("Does it fit?", text, kind)
    assert "80 GiB" in found.lines[0]


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("memory: rank 1 on cuda:1 is out of memory (got 79 GiB)", "no: out of memory"),
        (
            "rank 1: process was killed by SIGKILL (out of memory?)",
            "perhaps not: a rank was killed",
        ),
    ],
)
def test_a_run_that_found_no_memory_did_not_fit(error: str, text: str, tmp_path: Path) -> None:
    found = answer(tmp_path, error=error, memory_bytes=80 * GIB, memory_ranks=1)
    assert (found.text, found.kind) == (text, "bad")
    assert found.lines[-1] == error


@pytest.mark.parametrize("start", [{}, {"memory_bytes": 0, "memory_ranks": 1}])
def test_a_run_that_does_not_say_what_there_is_shows_its_memory(
    start: dict[str, int], tmp_path: Path
) -> None:
    found = answer(tmp_path, **start)
    assert (found.text, found.kind, found.lines) == ("1.00 GiB on the fullest rank", "plain", ())


@pytest.mark.parametrize(("transport", "ranks"), [("threads", 1), ("process", 2)])
def test_a_run_records_the_memory_that_its_ranks_share(
    transport: str, ranks: int, tmp_path: Path
) -> None:
    words = [*TINY, "--transport", transport, "--mesh", "dp2", "--prove.before", "never"]
    words += ["--data.source", str(write_text(tmp_path)), "--steps", "2"]
    assert main(["train", *words, "--out", str(tmp_path / "run")]) == EXIT_OK
    (start, *_) = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    assert start["memory_ranks"] == ranks
    assert 0 < start["memory_bytes"] <= total_bytes()
    assert answers(RunRecord.read(tmp_path / "run"))[1].text.startswith("yes: ")
