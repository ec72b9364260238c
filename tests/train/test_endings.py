"""How a run ends: a checkpoint after the last step by default, and an `end` event as the last line of events.jsonl."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.programs import programs
from tests.tiny_run import TINY
from weft.checkpoint.folder import checkpoint_path, checkpoints
from weft.cli import COMMANDS, main
from weft.commands.command import Command
from weft.core.mesh import Mesh
from weft.errors import EXIT_FAILED, EXIT_OK, RankError
from weft.run import launch
from weft.run.launch import join
from weft.run.world import World
from weft.train.event_lines import read_events
from weft.train.event_log import (
    EVENTS,
    EventLog,
    append_end_event,
    append_missing_end_event,
    end_run_of_dead_writer,
)


def events_of(folder: Path) -> list[dict[str, Any]]:
    return list(read_events(folder / EVENTS))


def step_event(step: int) -> dict[str, Any]:
    return {"event": "step", "step": step, "loss": 1.0, "grad_norm": 1.0}


def train(folder: Path, *words: str) -> Path:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    out = folder / "run"
    source = ("--data.source", str(folder / "text.txt"), "--out", str(out))
    assert main(["train", *TINY, *source, *words]) == EXIT_OK
    return out


def test_a_run_saves_after_its_last_step_by_default_and_says_where(tmp_path, capsys):
    out = train(tmp_path, "--steps", "3")
    path = checkpoint_path(out, 3)
    assert list(checkpoints(out)) == [(3, path)]
    assert f"saved step 3: {path}" in capsys.readouterr().out
    end = events_of(out)[-1]
    assert end["event"] == "end"
    assert end["status"] == "finished"
    assert end["steps"] == 3
    assert end["checkpoint"] == str(path)


def test_at_end_false_saves_nothing_after_the_last_step(tmp_path):
    out = train(tmp_path, "--steps", "3", "--save.at_end", "False")
    assert list(checkpoints(out)) == []
    assert events_of(out)[-1]["checkpoint"] is None


@pytest.mark.parametrize(
    ("error", "status"),
    [(RuntimeError("out of memory"), "failed"), (KeyboardInterrupt(), "interrupted")],
)
def test_an_exception_that_leaves_the_event_log_is_its_last_line(tmp_path, error, status):
    def step_and_fail():
        with EventLog(tmp_path) as log:
            log.emit({"event": "step", "step": 4})
            raise error

    with pytest.raises(type(error)):
        step_and_fail()
    *_, end = events_of(tmp_path)
    assert end["event"] == "end"
    assert end["status"] == status
    assert end["steps"] == 4
    assert end["error"].startswith(type(error).__name__)


def test_a_run_that_has_ended_gets_no_second_end(tmp_path):
    def stop_and_exit():
        with EventLog(tmp_path) as log:
            log.end("stopped")
            raise SystemExit(75)

    with pytest.raises(SystemExit):
        stop_and_exit()
    assert [event["event"] for event in events_of(tmp_path)] == ["end"]
    assert not append_end_event(tmp_path, "failed")


def test_the_end_of_a_killed_run_is_appended_behind_the_last_complete_line(tmp_path):
    (tmp_path / EVENTS).write_text(
        '{"event":"end","status":"stopped"}\n'
        '{"event":"step","step":7,"loss":1.0,"grad_norm":1.0}\n{"event":"st'
    )
    assert append_end_event(tmp_path, "failed", error="rank 1 was killed", seconds=2.5)
    assert events_of(tmp_path)[1:] == [
        step_event(7),
        {
            "event": "end",
            "status": "failed",
            "steps": 7,
            "seconds": 2.5,
            "error": "rank 1 was killed",
        },
    ]
    assert not append_end_event(tmp_path, "failed")
    assert not append_end_event(tmp_path / "nowhere", "failed")


def test_the_root_cause_replaces_the_error_of_a_failed_rank_0(tmp_path):
    def fail():
        with EventLog(tmp_path) as log:
            log.emit(step_event(2))
            raise ConnectionResetError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")

    with pytest.raises(ConnectionResetError):
        fail()
    append_end_event(tmp_path, "failed", error="rank 1 was killed", seconds=9.0)
    step, end = events_of(tmp_path)
    assert step == step_event(2)
    assert end["status"] == "failed"
    assert end["steps"] == 2
    assert end["error"] == "rank 1 was killed"
    assert end["seconds"] < 9.0


WRITER = """
import sys, time
from pathlib import Path
from weft.train.event_log import EventLog

out = Path(sys.argv[1])
log = EventLog(out)
for step in (1, 2):
    log.emit({"event": "step", "step": step, "loss": 1.0, "grad_norm": 1.0})
(out / "ready").touch()
time.sleep(60)
"""
"""What a rank 0 does that is killed: its events have no end."""


def test_another_rank_ends_the_run_of_a_killed_rank_0_only(tmp_path):
    with programs().running(WRITER, str(tmp_path)) as writer:
        while not (tmp_path / "ready").exists():
            assert writer.poll() is None
            time.sleep(0.01)
        assert not end_run_of_dead_writer(tmp_path, error="lost rank 0", wait_s=0.1)
    assert end_run_of_dead_writer(tmp_path, error="lost rank 0")
    assert not end_run_of_dead_writer(tmp_path, error="a second rank")
    *_, end = events_of(tmp_path)
    assert end["event"] == "end"
    assert end["status"] == "failed"
    assert end["steps"] == 2
    assert end["error"] == "lost rank 0"


def test_a_run_without_an_end_gets_one_when_it_is_started_again(tmp_path):
    out = train(tmp_path, "--steps", "2", "--save.every", "1")
    lines = (out / EVENTS).read_text().splitlines(keepends=True)
    (out / EVENTS).write_text("".join(lines[:-1]))
    train(tmp_path, "--steps", "3", "--resume", "auto")
    ends = [event for event in events_of(out) if event["event"] == "end"]
    actual = [(end["status"], end["steps"]) for end in ends]
    assert actual == [("failed", 2), ("finished", 3)]
    assert ends[0]["error"].startswith("killed before it could record its end")


def test_a_run_with_an_end_keeps_its_error(tmp_path):
    assert not append_missing_end_event(tmp_path, error="killed")
    (tmp_path / EVENTS).write_text('{"event":"end","status":"failed","error":"a cause"}\n')
    assert not append_missing_end_event(tmp_path, error="killed")
    (end,) = events_of(tmp_path)
    assert end["error"] == "a cause"


@pytest.mark.parametrize("code", [0, 3])
def test_user_code_that_leaves_the_program_is_an_error_and_no_success(monkeypatch, capsys, code):
    """A model that calls sys.exit(0) while it is checked, before ranks exist."""

    def leave(words):
        sys.exit(code)

    monkeypatch.setitem(COMMANDS, "train", Command("", "", leave))
    assert main(["train"]) == EXIT_FAILED
    error = capsys.readouterr().err
    assert error.startswith(f"error: the program was left by SystemExit: {code} [test_endings.py:")


def test_a_joined_rank_that_leaves_the_program_fails(monkeypatch):
    monkeypatch.setattr(launch, "prepare_rank", lambda _: None)  # it would set up this thread

    def leave(world):
        sys.exit(0)

    world = World(0, 2, local_rank=0, local_size=2, rendezvous="env://")
    with pytest.raises(RankError, match=r"rank 0 \(dp0\): SystemExit: 0 \[test_endings"):
        join(leave, world, mesh=Mesh.parse("dp2"))
