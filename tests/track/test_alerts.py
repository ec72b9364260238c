"""Alerts: which events are passed on and how often, a command, a URL whose secret is nowhere, and runs that nothing stops."""

from __future__ import annotations

import http.server
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.programs import WEFT, programs
from tests.tiny_run import TINY, write_text
from weft.cli import main
from weft.code.trust import is_text_trusted
from weft.config.alert_keys import expanded
from weft.config.rules.sections import secret_faults
from weft.config.schema import AlertConfig
from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_USER
from weft.track import alert_process
from weft.track.alert_process import AlertSender
from weft.track.alert_rules import MIN_INTERVAL_S, AlertLimit, alert_faults, payload

SECRET = "T0-51c2d-very-secret"
SPIKE = {"event": "guard", "kind": "spike", "step": 3, "text": "guard: a spike"}
RESTART = {
    "event": "restart",
    "step": 2,
    "reason": "rank 1 was killed",
    "attempt": 1,
    "of": 3,
    "source": "checkpoint",
    "detected_s": 0.1,
    "recovered_s": 1.0,
}
FINISHED = {"event": "end", "status": "finished", "steps": 9, "seconds": 61.0, "text": ""}
POLL_S = 0.05


class Inbox:
    """An HTTP server on the loopback that keeps what it gets, and answers with a status."""

    def __init__(self, status: int = 200, location: str = "") -> None:
        self.got: list[tuple[str, dict[str, Any]]] = []
        inbox = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                inbox.got.append((self.path, json.loads(body)))
                self.send_response(status)
                if location:
                    self.send_header("Location", location)
                self.end_headers()

            def do_GET(self) -> None:
                self.do_POST()

            def log_message(self, *args: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def inbox() -> Iterator[Inbox]:
    found = Inbox()
    yield found
    found.close()


def teller(folder: Path) -> tuple[str, Path]:
    """A command that adds what it gets to a file, and the file."""
    path, told = folder / "tell.sh", folder / "told.jsonl"
    path.write_text(f"#!/bin/sh\ncat >> '{told}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path), told


def read(told: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.read_text().splitlines()] if told.exists() else []


# -- pure ----------------------------------------------------------------------------------------


def test_at_most_one_alert_a_minute_of_each_kind_and_the_others_are_counted() -> None:
    limit = AlertLimit()
    other = {**SPIKE, "kind": "straggler"}
    assert [limit.admits(event, now_s=0.0) for event in (SPIKE, SPIKE, other, RESTART, SPIKE)] == [
        *(True, False, True, True, False)
    ]
    assert not limit.admits(SPIKE, now_s=MIN_INTERVAL_S - 1)
    assert limit.admits(SPIKE, now_s=MIN_INTERVAL_S)
    assert limit.take_dropped(SPIKE) == 3
    assert limit.take_dropped(SPIKE) == 0


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (SPIKE, "runs/a: guard: a spike"),
        (RESTART, "runs/a: rank 1 was killed. Restart 1 of 3 from the checkpoint of step 2"),
        (FINISHED, "runs/a: finished after step 9, 1:01"),
        ({**FINISHED, "status": "failed", "error": "no"}, "runs/a: failed after step 9, 1:01: no"),
    ],
)
def test_an_alert_is_the_event_with_a_text(event: dict[str, Any], text: str) -> None:
    found = json.loads(payload(event, run="runs/a", dropped=2))
    assert found["text"].startswith(text)
    assert found["run"] == "runs/a"
    assert found["not_passed_on"] == 2
    assert {key: found[key] for key in event if key != "text"} == {
        key: value for key, value in event.items() if key != "text"
    }


@pytest.mark.parametrize(
    ("alert", "line"),
    [
        (
            {"command": "no-such-program -x"},
            "alert.command: no such program (got 'no-such-program'",
        ),
        ({"command": "cat 'x"}, "alert.command: cannot be read"),
        ({"command": ""}, "alert.command: is empty"),
        ({"url": "$NOT_SET"}, "alert.url: names a variable that is not set (got $NOT_SET)"),
        ({"url": "ftp://host/x"}, "alert.url: is no URL that takes a POST"),
        ({"url": "host/x"}, "alert.url: is no URL that takes a POST"),
        ({"url": "http://"}, "alert.url: is no URL that takes a POST"),
        ({"url": "$BAD"}, "alert.url: is no URL that takes a POST"),
    ],
)
def test_what_cannot_be_told_is_one_line(alert: dict[str, str], line: str, tmp_path: Path) -> None:
    environ = {"WEFT_TRUSTED_CODE": "all", "BAD": f"http://[{SECRET}"}
    (fault,) = alert_faults(AlertConfig(**alert), environ)
    assert str(fault).startswith(line)
    assert fault.fix
    assert SECRET not in str(fault)


@pytest.mark.parametrize(
    "url",
    [
        f"https://me:{SECRET}@host/x",
        f"https://hooks.slack.com/services/T01/B02/{SECRET}",
        f"https://host/x?key={SECRET}",
        f"https://host/x#{SECRET}",
    ],
)
def test_a_literal_secret_is_rejected_and_not_shown(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command in ("train", "explain"):
        words = [command, *TINY, "--alert.url", url]
        words += ["--out", str(tmp_path / "run")] if command == "train" else []
        assert main(words) == EXIT_USER
        out, err = capsys.readouterr()
        assert err.startswith("error: alert.url: ")
        assert len(err.splitlines()) == 1
        assert SECRET not in out + err
    assert not (tmp_path / "run").exists()


def test_variables_are_expanded_in_every_form() -> None:
    environ = {"HOST": "http://h", "KEY": "k"}
    assert expanded("$HOST/a/${KEY}/b$KEY", environ) == "http://h/a/k/bk"
    assert not list(secret_faults(AlertConfig(url="${A_LONG_NAME_OF_A_VARIABLE}/x")))
    assert not list(secret_faults(AlertConfig(url="https://ntfy.sh/my-run")))


# -- the sender ----------------------------------------------------------------------------------


def test_what_fails_is_said_once_without_the_url(
    inbox: Inbox, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing, elsewhere = Inbox(status=500), Inbox(status=302, location=f"{inbox.url}/other")
    monkeypatch.setenv("SECRET", SECRET)
    urls = {
        f"{refusing.url}/$SECRET": "status 500",
        f"{elsewhere.url}/$SECRET": "status 302",
        "http://127.0.0.1:9/$SECRET": "cannot be reached: ",
    }
    for url, why in urls.items():
        sender = AlertSender(AlertConfig(url=url, command="false"), "run")
        sender.send(SPIKE, now_s=0.0)
        sender.send(RESTART, now_s=0.0)
        lines = capsys.readouterr().err.splitlines()
        assert lines[0] == "warning: alert.command: exit code 1. Training goes on"
        assert lines[1].startswith(f"warning: alert.url: {why}")
        assert len(lines) == 2
        assert SECRET not in lines[1]
    assert [path for path, _ in refusing.got] == [f"/{SECRET}"] * 2
    assert not inbox.got, "a redirect is not followed"
    for server in (refusing, elsewhere):
        server.close()


def test_a_command_that_does_not_end_is_ended(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alert_process, "LIMIT_S", 0.2)
    start_s = time.monotonic()
    AlertSender(AlertConfig(command="sleep 60"), "run").send(SPIKE, now_s=0.0)
    assert time.monotonic() - start_s < 10
    assert "has not ended within 0.2 s, and was ended" in capsys.readouterr().err


# -- the process ---------------------------------------------------------------------------------


def follow(folder: Path, *, start: int, lines: list[str], message: bytes) -> list[dict[str, Any]]:
    """What the process passes on while a run writes these lines, and its process then says or not."""
    command, told = teller(folder)
    process = subprocess.Popen(
        [sys.executable, "-m", "weft.track.alert_process"], stdin=subprocess.PIPE
    )
    assert process.stdin is not None
    request = {"alert": {"command": command, "url": None}, "out": str(folder), "start": start}
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.flush()
    with (folder / "events.jsonl").open("a") as file:
        for line in lines:
            file.write(line)
            file.flush()
    time.sleep(2 * alert_process.POLL_S)
    process.stdin.write(message)
    process.stdin.close()
    process.wait(60)
    return read(told)


def test_events_of_this_start_are_passed_on_and_the_end_once(tmp_path: Path) -> None:
    before = json.dumps({**SPIKE, "step": 1}) + "\n"
    (tmp_path / "events.jsonl").write_text(before)
    events = [{"event": "step", "step": 3}, SPIKE, SPIKE, RESTART, FINISHED]
    lines = [json.dumps(event) + "\n" for event in events]
    half = lines[1][:20]
    lines[1:2] = [half, lines[1][20:]]
    found = follow(tmp_path, start=len(before), lines=lines, message=b'{"error": ""}\n')
    assert [(event["event"], event.get("step")) for event in found] == [
        *(("guard", 3), ("restart", 2), ("end", None))
    ]


@pytest.mark.parametrize(
    ("message", "error"),
    [(b'{"error": "RankError: rank 1"}\n', "RankError: rank 1"), (b"", alert_process.NO_END)],
)
def test_a_run_without_a_recorded_end_has_failed(
    tmp_path: Path, message: bytes, error: str
) -> None:
    line = json.dumps({"event": "step", "step": 3}) + "\n"
    (found,) = follow(tmp_path, start=0, lines=[line], message=message)
    assert (found["status"], found["steps"], found["error"]) == ("failed", 3, error)


# -- runs ----------------------------------------------------------------------------------------


def words_of(folder: Path, *more: str) -> list[str]:
    text = write_text(folder)
    return ["train", *TINY, "--data.source", str(text), "--out", str(folder / "run"), *more]


def test_guards_and_the_end_of_a_run_are_posted_and_no_secret_is_stored(
    tmp_path: Path, inbox: Inbox, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ALERT_KEY", SECRET)
    command, told = teller(tmp_path)
    where = ("--alert.url", f"{inbox.url}/$ALERT_KEY", "--alert.command", command)
    more = ("--optim.lr", "1e30", "--optim.warmup", "0", "--guard.nonfinite", "skip")
    words = words_of(tmp_path, *where, *more, "--guard.max_failures", "9", "--steps", "5")
    assert main([*words, "--track", "csv", "tensorboard"]) == EXIT_OK
    assert [path for path, _ in inbox.got] == [f"/{SECRET}"] * 2
    events = [event for _, event in inbox.got]
    assert [(event["event"], event.get("kind")) for event in events] == [
        *(("guard", "nonfinite"), ("end", None))
    ]
    assert events[1]["status"] == "finished"
    assert read(told) == events
    out, err = capfd.readouterr()
    assert SECRET not in out + err
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]
    assert f'url = "{inbox.url}/$ALERT_KEY"' in (tmp_path / "run" / "run.toml").read_text()


def test_a_failure_is_told_and_alerts_that_fail_do_not_stop_a_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command, told = teller(tmp_path)
    where = ("--alert.command", command, "--alert.url", "http://127.0.0.1:9/x")
    more = ("--optim.lr", "1e30", "--optim.warmup", "0", "--steps", "5", "--mesh", "dp2")
    assert main(words_of(tmp_path, *where, *more)) == EXIT_FAILED
    err = capfd.readouterr().err
    assert err.count("warning: alert.url: cannot be reached") == 1
    guard, end = read(told)
    assert (guard["event"], guard["action"]) == ("guard", "stop")
    assert (end["event"], end["status"]) == ("end", "failed")
    assert "gradient norm is nan" in end["error"]


@pytest.mark.timeout(240)
def test_a_run_that_is_killed_is_told(tmp_path: Path) -> None:
    command, told = teller(tmp_path)
    words = words_of(tmp_path, "--steps", "1000000", "--alert.command", command, "--mesh", "dp2")
    words[words.index("threads")] = "process"
    events = tmp_path / "run" / "events.jsonl"
    with programs().running(WEFT, *words) as program:
        while not (events.exists() and '"event":"step"' in events.read_text()):
            assert program.poll() is None
            time.sleep(POLL_S)
        program.kill()
        assert program.wait() == -signal.SIGKILL
    deadline_s = time.monotonic() + 60
    while not read(told) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    (found,) = read(told)
    assert (found["event"], found["status"]) == ("end", "failed")
    assert found["steps"] >= 1


def test_what_only_a_stored_file_names_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    command, told = teller(tmp_path)
    words = words_of(tmp_path, "--steps", "2", "--alert.command", command)
    assert main(words) == EXIT_OK
    assert len(read(told)) == 1
    run = str(tmp_path / "run")
    assert main(["train", run, "--steps", "3"]) == EXIT_OK, "this user has named it"
    assert len(read(told)) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of another user"))
    monkeypatch.delenv("WEFT_TRUSTED_CODE", raising=False)
    capfd.readouterr()
    for word in (run, f"{run}/run.toml"):
        assert main(["train", word, "--resume", "auto", "--steps", "4"]) == EXIT_USER
        assert "alert.command: is set by a stored file alone" in capfd.readouterr().err
    assert len(read(told)) == 2
    assert not is_text_trusted("alert.command", command, os.environ)
    assert main(["train", run, "--steps", "4", "--trust_code"]) == EXIT_OK
    assert len(read(told)) == 3
