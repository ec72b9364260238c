"""`weft status` of running, stuck, failed, finished and abandoned runs; real ones in tests/gloo/test_recovery.py."""

from __future__ import annotations

import json
import os
import re
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from weft.cli import main
from weft.comm.transport import Call
from weft.commands import status as status_module
from weft.commands.status import NO_END, RunStatus, run_status
from weft.errors import EXIT_OK, EXIT_USER, UserError
from weft.run.folder_lock import acquire, publish_status_board
from weft.run.rank_status import StatusBoard

STEP = {"event": "step", "step": 7, "loss": 2.5, "grad_norm": 1.0, "tokens": 617, "step_s": 0.5}
AGAIN = "no checkpoint; start again: weft train {folder}/run.toml --resume auto"


def write(folder: Path, *events: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(event) + "\n" for event in events]
    (folder / "events.jsonl").write_text("".join(lines) + '{"event":"st')
    (folder / "run.toml").write_text('mesh = "dp2"\nsteps = 20\n')
    return folder


def board_path(folder: Path, name: str = "weft-test") -> Path:
    """Where a launcher has its status board: in a folder for its user alone."""
    private = folder / name
    private.mkdir(mode=0o700, exist_ok=True)
    return private / "board"


def status_of(folder: Path) -> RunStatus:
    return run_status(folder, now_s=time.monotonic())


@pytest.mark.parametrize(
    ("end", "state", "text"),
    [
        ({"status": "finished", "text": ""}, "done", ""),
        ({"status": "failed", "error": "rank 1 (dp1): killed"}, "failed", "rank 1 (dp1): killed"),
        ({"status": "stopped", "text": "stopped after step 7"}, "stopped", "stopped after step 7"),
        ({"status": "interrupted", "error": ""}, "interrupted", AGAIN),
    ],
)
def test_an_ended_run_shows_how_it_ended(tmp_path, end, state, text):
    found = status_of(write(tmp_path / "run", STEP, {"event": "end", **end}))
    assert found.state == state
    assert found.text == text.format(folder=tmp_path / "run")
    assert found.step == 7
    assert found.steps == 20
    assert found.loss == 2.5
    assert found.tokens_per_s == 1234.0


@pytest.mark.parametrize(
    ("keys", "unit"),
    [("", "tokens"), ('loss = "dpo"\n', "pairs"), ('model.name = "mnist"\n', "images")],
)
def test_the_speed_is_in_what_the_run_counts(tmp_path, keys, unit):
    folder = write(tmp_path / "run", STEP)
    config = folder / "run.toml"
    config.write_text(config.read_text() + keys)
    first, *_ = status_of(folder).lines()
    assert f"1,234 {unit}/s" in first


def test_a_run_without_an_end_whose_launcher_is_gone_has_failed(tmp_path):
    found = status_of(write(tmp_path / "run", STEP))
    again = AGAIN.format(folder=tmp_path / "run")
    assert found.state == "failed"
    assert found.text == f"{NO_END}\n  {again}"


def test_no_run_is_one_line(tmp_path):
    with pytest.raises(UserError, match="there is no run here"):
        status_of(tmp_path)
    with pytest.raises(UserError, match="there is no run here"):
        status_of(tmp_path / "missing")


def test_escape_sequences_of_events_are_shown_as_text(tmp_path, capsys):
    end = {"event": "end", "status": "failed", "error": "\x1b]0;x\x07\x1b[2J\u202egood"}
    folder = write(tmp_path / "run", STEP, end)
    assert main(["status", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert r"\x1b[2J\u202egood" in shown


def test_numbers_that_are_not_finite_are_null_in_json(tmp_path, capsys):
    nan = float("nan")
    folder = write(tmp_path / "run", {**STEP, "loss": nan, "step_s": nan})
    assert main(["status", str(folder), "--json"]) == 0

    def reject(name):
        raise AssertionError(name)

    found = json.loads(capsys.readouterr().out, parse_constant=reject)
    assert found["loss"] is found["tokens_per_s"] is None


def test_a_running_run_shows_its_ranks(tmp_path, capsys):
    folder = write(tmp_path / "run", STEP)
    board = StatusBoard.create(board_path(tmp_path), 2)
    for rank in range(2):
        board.rank(rank).begin(attempt=1)
        board.rank(rank).on_phase(8, "backward")
    with acquire(folder):
        publish_status_board(folder, board_path(tmp_path))
        assert main(["status", str(folder)]) == 0
        first, *ranks = capsys.readouterr().out.splitlines()
        assert main(["status", str(folder), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
    assert first.startswith(
        f"{folder}: running, step 7 of 20, loss 2.5000, 1,234 tokens/s, restarts 1, process {os.getpid()} on "
    )
    assert [
        line.startswith(f"  rank {rank} (dp{rank})  pid {os.getpid()}  step 8, backward, ")
        for rank, line in enumerate(ranks)
    ] == [True, True]
    assert found["state"] == "running"
    assert found["pid"] == os.getpid()
    assert len(found["ranks"]) == 2


def test_a_stuck_run_names_the_culprit(tmp_path):
    folder = write(tmp_path / "run", STEP)
    board = StatusBoard.create(board_path(tmp_path), 2)
    call = Call(
        op="all_reduce", axis="dp", ranks=(0, 1), index=0, signature="all_reduce(sum) float32[4]"
    )
    for rank in range(2):
        status = board.rank(rank)
        status.begin(attempt=0)
        for step in range(1, 9):
            status.on_phase(step, "data")
            status.on_phase(step, "update")
        status.on_phase(9, "reduce")
        if rank == 0:
            status.waiting(call, status.started(call))
    with acquire(folder):
        publish_status_board(folder, board_path(tmp_path))
        assert status_of(folder).state == "running"
        paused = run_status(folder, now_s=time.monotonic() + 3.0)
        found = run_status(folder, now_s=time.monotonic() + 61.0)
    assert paused.state == "running", "a rank in code may pause for a minute"
    assert found.state == "stuck"
    assert re.match(
        r"rank 1 \(dp1\): step 9, reduce: no progress for 61\.\d s; missing in all_reduce\(sum\)",
        found.text,
    )
    assert [rank.is_stopped for rank in found.ranks] == [False, False]


def test_ranks_that_are_being_started_are_not_stuck(tmp_path):
    folder = write(tmp_path / "run", STEP)
    StatusBoard.create(board_path(tmp_path), 2)
    with acquire(folder):
        publish_status_board(folder, board_path(tmp_path))
        found = run_status(folder, now_s=time.monotonic() + 60.0)
    assert found.state == "running"
    assert [str(rank) for rank in found.ranks] == [
        "  rank 0 (dp0)  is being started",
        "  rank 1 (dp1)  is being started",
    ]


def test_a_run_is_not_stuck_before_its_timeout(tmp_path):
    folder = write(tmp_path / "run", STEP)
    with (folder / "run.toml").open("a") as file:
        file.write("[run]\ntimeout_s = 60.0\n")
    board = StatusBoard.create(board_path(tmp_path), 2)
    call = Call(
        op="all_reduce", axis="dp", ranks=(0, 1), index=0, signature="all_reduce(sum) float32[4]"
    )
    ranks = [board.rank(0), board.rank(1)]
    for status in ranks:
        status.begin(attempt=0)
        for step in range(1, 9):
            status.on_phase(step, "data")
            status.on_phase(step, "update")
    position = ranks[0].started(call)
    ranks[0].waiting(call, position)
    with acquire(folder):
        publish_status_board(folder, board_path(tmp_path))
        now_s = time.monotonic() + 30.0
        assert run_status(folder, now_s=now_s).state == "running"
        assert run_status(folder, now_s=time.monotonic() + 90.0).state == "stuck"


def test_an_ended_run_shows_its_restarts(tmp_path):
    restart = {"event": "restart", "attempt": 1, "step": 4}
    end = {"event": "end", "status": "finished"}
    events = ({"event": "run"}, restart, {"event": "run"}, restart, STEP, end)
    folder = write(tmp_path / "run", *events)
    restarts = status_of(folder).restarts
    assert restarts == 1


@pytest.mark.parametrize(
    ("event", "config"),
    [
        ({"event": "step"}, ""),
        ({"event": "step", "step": "x", "loss": [1]}, 'steps = "x"\nmesh = 3\nrun = 1\n'),
        ({"event": "step", "step": 7, "loss": None, "tokens_per_s": "x"}, 'mesh = "zz9"\n'),
    ],
)
def test_damaged_events_and_configs_are_left_out(tmp_path, event, config):
    folder = write(tmp_path / "run", event, {"event": "end", "status": "finished"})
    (folder / "run.toml").write_text(config)
    assert status_of(folder).state == "done"
    StatusBoard.create(board_path(tmp_path), 2).rank(0).begin(attempt=0)
    with acquire(folder):
        publish_status_board(folder, board_path(tmp_path))
        assert status_of(folder).state == "running"


def _elsewhere(place: Path) -> Path:
    return board_path(place, "other")


def _readable_by_all(place: Path) -> Path:
    path = board_path(place)
    path.parent.chmod(0o755)
    return path


def _behind_a_link(place: Path) -> Path:
    path = board_path(place, "weft-real")
    (place / "weft-link").mkdir(mode=0o700)
    link = place / "weft-link" / "board"
    link.symlink_to(path)
    return link


def _hard_link(place: Path) -> Path:
    path = board_path(place, "weft-real")
    StatusBoard.create(path, 2)
    (place / "weft-link").mkdir(mode=0o700)
    os.link(path, place / "weft-link" / "board")
    return place / "weft-link" / "board"


def _named_otherwise(place: Path) -> Path:
    return board_path(place).with_name("slots")


def _of_another_user(place: Path) -> Path:
    return board_path(place)


@pytest.mark.parametrize(
    "make",
    [_elsewhere, _readable_by_all, _behind_a_link, _hard_link, _named_otherwise, _of_another_user],
)
def test_a_board_that_no_launcher_of_the_owner_has_made_is_not_read(tmp_path, monkeypatch, make):
    """A run.lock by another hand cannot make `weft status` open a file of another place."""
    folder = write(tmp_path / "run", STEP)
    path = make(tmp_path)
    if not path.exists():
        StatusBoard.create(path.resolve(), 2).rank(0).begin(attempt=0)
    if make is _of_another_user:
        real = os.lstat

        def lstat(path, **options):
            found = real(path, **options)
            is_lock = str(path).endswith("run.lock")
            fields = list(found[:10])
            fields[stat.ST_UID] += is_lock
            return os.stat_result(fields)

        monkeypatch.setattr("weft.commands.status.os.lstat", lstat)
    with acquire(folder):
        publish_status_board(folder, path)
        found = status_of(folder)
    assert found.state == "running"
    assert found.pid == os.getpid()
    assert found.ranks == (())


def test_a_watched_run_is_shown_when_it_changes_until_it_ends(monkeypatch, capsys):
    looks = iter(
        [
            RunStatus("runs/x", "running", step=1, steps=3),
            RunStatus("runs/x", "running", step=1, steps=3),
            RunStatus("runs/x", "stuck", "rank 1 is stopped", step=2, steps=3),
            RunStatus("runs/x", "done", step=3, steps=3),
        ]
    )
    monkeypatch.setattr(status_module, "run_status", lambda folder, now_s: next(looks))
    monkeypatch.setattr(status_module, "WATCH_S", 0)
    assert main(["status", "runs/x", "--watch"]) == EXIT_OK
    assert capsys.readouterr().out.splitlines() == [
        "runs/x: running, step 1 of 3",
        "runs/x: stuck, step 2 of 3",
        "  rank 1 is stopped",
        "runs/x: done, step 3 of 3",
    ]


def test_a_watched_run_has_no_json(capsys):
    assert main(["status", "runs/x", "--watch", "--json"]) == EXIT_USER
    assert "watch: is for text (got --json). Fix: leave one of both out" in capsys.readouterr().err
