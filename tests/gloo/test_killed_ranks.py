"""`weft train` with a rank that is killed: the `end` event, the error, and the command to resume, which works."""

from __future__ import annotations

import os
import re
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.programs import WEFT, Program, programs
from tests.supervised import status_board, training
from weft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

DP3 = ("--mesh", "dp3", "--batch.global_size", "6", "--run.restarts", "0")
PATIENCE_S = 90


@contextmanager
def endless(out: Path, *words: str) -> Iterator[Program]:
    """An endless `weft train` on three ranks."""
    with training(out, *DP3, "--steps", "1000000", *words) as process:
        yield process


def wait_for_event(out: Path, kind: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        if (out / EVENTS).exists() and any(
            event["event"] == kind for event in read_events(out / EVENTS)
        ):
            return
        assert time.monotonic() < deadline, f"no {kind} event"
        time.sleep(0.02)


def kill_rank(out: Path, rank: int) -> None:
    """SIGKILL a rank."""
    os.kill(status_board(out).read(rank).pid, signal.SIGKILL)


@pytest.mark.parametrize("rank", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_killed_rank_leaves_an_end_event_and_the_command_to_resume(tmp_path, rank):
    out = tmp_path / "run"
    with endless(out, "--save.every", "2") as process:
        wait_for_event(out, "save")
        kill_rank(out, rank)
        _, err = process.communicate(timeout=PATIENCE_S)
    first, *_, last = err.splitlines()
    assert process.returncode == EXIT_FAILED
    error = rf"error: rank {rank} \(dp{rank}\): step \d+, .*killed by SIGKILL \(out of memory\?\)"
    assert re.fullmatch(error, first)
    assert last == f"  resume: weft train {out}/run.toml --resume auto"

    *steps, end = read_events(out / EVENTS)
    assert end["event"] == "end"
    assert end["status"] == "failed"
    num_steps = max(event["step"] for event in steps if event["event"] == "step")
    assert end["steps"] == num_steps
    assert end["seconds"] > 0
    assert end["error"] == err.removeprefix("error: ").rstrip("\n")
    assert [event["event"] for event in steps].count("end") == 0

    resume = shlex.split(last.removeprefix("  resume: weft "))
    steps = ("--steps", str(num_steps + 1))
    resumed = programs().run(WEFT, *resume, *steps, timeout=PATIENCE_S)
    assert (resumed.returncode, resumed.stderr) == (EXIT_OK, "")
    assert list(read_events(out / EVENTS))[-1]["status"] == "finished"


def test_without_a_checkpoint_the_error_has_the_command_to_start_again(tmp_path):
    out = tmp_path / "run"
    with endless(out) as process:
        wait_for_event(out, "step")
        kill_rank(out, 0)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_FAILED
    first, last = err.splitlines()
    assert first.startswith("error: rank 0 (dp0): step ")
    assert last == f"  no checkpoint; start again: weft train {out}/run.toml --resume auto"
    end = list(read_events(out / EVENTS))[-1]
    assert end["status"] == "failed"
    assert f"error: {end['error']}\n" == err
    assert end["seconds"] > 0


@pytest.mark.parametrize(
    "pause_s", [0.02, *(pytest.param(each, marks=pytest.mark.slow) for each in (0.1, 0.15, 0.3))]
)
def test_ctrl_c_twice_leaves_an_end_event_and_one_line_on_how_to_go_on(tmp_path, pause_s):
    out = tmp_path / "run"
    with endless(out, "--save.every", "2") as process:
        wait_for_event(out, "save")
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(pause_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_INTERRUPTED
    (line,) = err.splitlines()
    assert re.fullmatch(
        rf"interrupted after step \d+; saved: step \d+; resume: weft train {out}/run.toml --resume auto",
        line,
    )
    end = list(read_events(out / EVENTS))[-1]
    assert end["event"] == "end"
    assert end["status"] == "interrupted"
