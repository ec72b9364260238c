"""`weft train` in real processes, interrupted in several ways and resumed: the numbers equal those of an uninterrupted run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.programs import WEFT, Program, programs
from tests.supervised import numbers
from tests.tiny_run import MODEL, SEQUENCES, write_text
from weft.checkpoint.folder import checkpoints
from weft.checkpoint.read import open_checkpoint
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS

WORDS = (
    *("train", "--mesh", "dp3", *MODEL, *SEQUENCES, "--batch.global_size", "6"),
    *("--optim.decay", "constant", "--optim.warmup", "2"),
)
FOREVER = ("--steps", "1000000")
PATIENCE_S = 90


@contextmanager
def running(folder: Path, *words: str) -> Iterator[Program]:
    source = ("--data.source", str(folder / "text.txt"))
    with programs().running(WEFT, *WORDS, *source, *words) as process:
        yield process


def ended(folder: Path, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    with running(folder, *words) as process:
        out, err = process.communicate(timeout=PATIENCE_S)
        return process.wait(), out, err


def finished(folder: Path, *words: str) -> str:
    code, out, err = ended(folder, *words)
    assert (code, err) == (EXIT_OK, "")
    return out


def wait_until(out: Path, seen: Callable[[list[dict[str, Any]]], bool]) -> None:
    """Until the events of a run that goes on for ever show something."""
    deadline = time.monotonic() + PATIENCE_S
    while not ((out / EVENTS).exists() and seen(list(read_events(out / EVENTS)))):
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def count(events: list[dict[str, Any]], kind: str) -> int:
    return sum(event["event"] == kind for event in events)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    write_text(place)
    return place


def test_asked_to_leave_then_killed_then_started_again_it_ends_with_the_same_numbers(folder):
    out = folder / "broken"
    again = ("--out", str(out), "--save.every", "3", "--resume", "auto")
    with running(folder, *again, *FOREVER) as process:
        wait_until(out, lambda events: count(events, "save") > 0)
        process.send_signal(signal.SIGUSR1)
        shown, told = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, told) == (EXIT_PREEMPTED, "")
    stopped_at = next(checkpoints(out))[0]
    assert shown.rstrip().endswith(
        f"stopped after step {stopped_at} and saved. Resume: weft train {out}/run.toml --resume auto"
    )
    with running(folder, *again, *FOREVER) as process:
        wait_until(
            out,
            lambda events: (
                max((event["step"] for event in events if event["event"] == "save"), default=0)
                > stopped_at
            ),
        )
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE_S)
    newest = next(checkpoints(out))[0]
    assert newest > stopped_at
    last = ("--steps", str(newest + 2))
    assert f"resumed after step {newest}: {out}/ckpt/step-{newest:06d}, written by dp3" in finished(
        folder, *again, *last
    )
    finished(folder, "--out", str(folder / "straight"), *last)
    assert numbers(out) == numbers(folder / "straight")
    actual = [step for step, _, _ in numbers(out)]
    assert actual == list(range(1, newest + 3))


def test_sigterm_in_threads_saves_without_save_every(folder):
    out = folder / "threads"
    with running(folder, "--out", str(out), "--transport", "threads", *FOREVER) as process:
        wait_until(out, lambda events: count(events, "step") > 1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=PATIENCE_S)
    assert process.returncode == EXIT_PREEMPTED
    step, path = next(checkpoints(out))
    open_checkpoint(path).verify()
    assert numbers(out)[-1][0] == step
    assert json.loads((path / "manifest.json").read_text())["facts"]["step"] == step


@pytest.fixture
def small_disk(tmp_path):
    """A disk of its own, with room for one checkpoint and no second one."""
    if (
        os.geteuid()
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=280k", "weft", tmp_path], check=False
        ).returncode
    ):
        pytest.skip("only root can mount a small disk")
    yield tmp_path
    subprocess.run(["umount", "-l", tmp_path], check=True)


def test_a_full_disk_costs_a_warning_and_not_the_run(folder, small_disk):
    out = small_disk / "run"
    keys = ("--steps", "5", "--save.every", "2", "--save.keep", "9", "--save.at_end", "False")
    shown = finished(folder, "--out", str(out), *keys)
    events = list(read_events(out / EVENTS))
    assert [event["step"] for event in events if event["event"] == "save"] == [2]
    (path,) = [path for _, path in checkpoints(out)]
    open_checkpoint(path).verify()
    actual = [step for step, _, _ in numbers(out)]
    assert actual == [1, 2, 3, 4, 5]
    (warning,) = [line for line in shown.splitlines() if line.startswith("warning: step 4 ")]
    assert "KiB needed" in warning
    assert "KiB free" in warning
    assert warning.endswith(f"Training continues; the newest checkpoint is {path}")


def test_a_last_checkpoint_that_cannot_be_saved_is_a_failed_run(folder, small_disk):
    out = small_disk / "run"
    words = ("--out", str(out), "--steps", "3", "--save.every", "2", "--save.keep", "9")
    code, _, err = ended(folder, *words, "--save.wait_s", "0")
    assert code == EXIT_FAILED
    assert "finished after step 3, which could not be saved: " in err
    assert "the disk is full" in err
    *_, end = read_events(out / EVENTS)
    assert end["event"] == "end"
    assert end["status"] == "failed"
    assert end["steps"] == 3
    (last, path), *others = checkpoints(out)
    assert last == 3
    assert path.is_symlink(), "the state is kept in memory"
    assert [step for step, _ in others] == [2]
    shutil.rmtree(path.resolve().parents[1])
