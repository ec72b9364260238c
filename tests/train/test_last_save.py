"""A disk that is full at the end of a run: the state is kept in memory, and a resume takes it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_run import TINY, write_text
from weft.checkpoint import kept
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.checkpoint.read import open_checkpoint
from weft.cli import main
from weft.errors import EXIT_OK, EXIT_USER, RankError, SaveError
from weft.run.failure import describe_error
from weft.run.supervisor import RestartPolicy, SupervisedEnd
from weft.start.checked_run import load_checked_run
from weft.start.run_folder import locked_out
from weft.start.train_run import train
from weft.train import last_save
from weft.train.event_lines import read_events
from weft.train.event_log import EVENTS
from weft_selftest.chaos.chaos_trial import record_of

STEPS = 4


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The folder in which states are kept."""
    folder = tmp_path / "memory"
    folder.mkdir()
    monkeypatch.setattr(kept, "MEMORY_FOLDER", folder)
    monkeypatch.setattr(last_save, "RETRY_S", 0.05)
    return folder


def words(tmp_path: Path, out: Path, *more: str) -> tuple[str, ...]:
    source = ("--data.source", str(write_text(tmp_path)), "--out", str(out))
    return (*TINY, "--mesh", "dp2", "--steps", str(STEPS), *source, *more)


def run_with(
    given: tuple[str, ...], out: Path, on_event: Callable[[Mapping[str, Any]], None]
) -> int:
    """Train; `on_event` is called with every event."""
    run = load_checked_run(given)
    with locked_out(run.model, str(out), run.resume, now=datetime.now()):
        return train(run, on_event=lambda event, _: on_event(event))


def fill(disk: Path) -> None:
    """Leave no free page."""
    filler = os.open(disk / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with suppress(OSError):
        while os.write(filler, bytes(4096)):
            pass
    os.close(filler)


def fills_at_last_step(
    disk: Path, *, after: Path | None = None
) -> Callable[[Mapping[str, Any]], None]:
    """Args: after: a checkpoint that is written in the background, and waited for."""

    def on_event(event: Mapping[str, Any]) -> None:
        if event["event"] == "step" and event["step"] == STEPS:
            deadline_s = time.monotonic() + 30
            while after is not None and not after.exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)
            fill(disk)

    return on_event


def test_the_state_is_kept_in_memory_and_a_resume_saves_it(tmp_path, small_disk, memory, capsys):
    out = small_disk / "run"
    given = words(tmp_path, out, "--save.wait_s", "0.2", "--save.every", "2")
    with pytest.raises(RankError) as caught:
        run_with(given, out, fills_at_last_step(small_disk, after=checkpoint_path(out, 2)))
    (folder,) = memory.iterdir()
    path = checkpoint_path(folder, STEPS)
    assert caught.value.kind == "all ranks"
    assert str(caught.value).startswith(f"finished after step {STEPS}, which could not be saved: ")
    assert f"It is kept in memory until this machine ends: {path}. Go on: weft train " in str(
        caught.value
    )
    assert os.stat(folder).st_mode & 0o077 == 0, "for this user alone"
    assert next(checkpoints(out)) == (STEPS, checkpoint_path(out, STEPS)), "linked"
    shown = capsys.readouterr().out
    assert "warning: no room for step 4: clear" in shown
    assert "Training continues" not in shown

    (small_disk / "filler").unlink(missing_ok=True)
    assert main(["train", str(out / "run.toml"), "--resume", "auto"]) == EXIT_OK
    assert not checkpoint_path(out, STEPS).is_symlink()
    open_checkpoint(checkpoint_path(out, STEPS)).verify()
    assert list(memory.iterdir()) == [], "removed, once it is on the disk"
    whole = tmp_path / "whole"
    assert main(["train", *words(tmp_path, whole, "--save.every", "2")]) == EXIT_OK
    assert record_of(whole)[1] == record_of(out)[1], "the same bits as without the fault"


def test_a_disk_that_is_cleared_in_time_takes_the_last_step(tmp_path, small_disk, memory):
    out = small_disk / "run"
    fill_disk = fills_at_last_step(small_disk)

    def on_event(event: Mapping[str, Any]) -> None:
        fill_disk(event)
        if event["event"] == "note" and "no room" in event["text"]:
            (small_disk / "filler").unlink(missing_ok=True)

    assert run_with(words(tmp_path, out), out, on_event) == EXIT_OK
    open_checkpoint(checkpoint_path(out, STEPS)).verify()
    assert list(memory.iterdir()) == []
    kinds = [event["event"] for event in read_events(out / EVENTS)]
    assert kinds[-4:] == ["save_failed", "note", "save", "end"]


def test_without_room_for_a_checkpoint_no_step_is_trained(tmp_path, small_disk, capsys):
    given = words(tmp_path, small_disk / "run")
    with (small_disk / "filler").open("wb") as filler:
        filler.write(bytes(2 * 2**20 - 64 * 1024))
    assert main(["train", *given]) == EXIT_USER
    error = capsys.readouterr().err
    assert "out: no checkpoint fits on the disk of" in error
    assert "Fix: free disk space, or choose another --out" in error
    shutil.rmtree(small_disk / "run", ignore_errors=True)
    assert main(["train", *given, "--save.at_end", "False"]) == EXIT_OK, "it saves nothing"


def test_ranks_are_not_started_again_for_a_last_step_that_no_disk_takes():
    failure = describe_error(SaveError("finished after step 4"), rank=0, at_s=0.0)
    assert not RestartPolicy(3).allows(SupervisedEnd(failure=failure, step=4))
