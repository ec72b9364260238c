"""Passes events of a run on to a command and a URL, in a process of its own, which neither stops nor delays the run."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from weft.config.alert_keys import expanded
from weft.config.schema import AlertConfig
from weft.errors import type_and_message
from weft.small_files import UnreadableFile, open_regular
from weft.track.alert_rules import KINDS, AlertLimit, payload

EVENTS = "events.jsonl"
POLL_S = 0.5
LIMIT_S = 10.0
"""Time that a command, or a request, may take; then it is ended."""
CLOSE_S = 2 * LIMIT_S + 5.0
"""How long the end of a run waits for its last alert."""
NO_END = "the processes of the run are gone, and its end is not recorded (killed?)"
SETTLE_S = 3.0
"""Time in which another process may record the end of a run that was killed."""


@contextmanager
def alerts(alert: AlertConfig, out: Path | None) -> Iterator[None]:
    """Pass on the events of the run inside, and its end; nothing without a command and a URL."""
    if out is None or not (alert.command or alert.url):
        yield
        return
    process = _start(alert, out)
    error = ""
    try:
        yield
    except BaseException as raised:
        error = type_and_message(raised)
        raise
    finally:
        _end(process, error)


def _start(alert: AlertConfig, out: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - this Python, with this module
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # Ctrl-C of the terminal does not end it
    )
    request = {"alert": alert.model_dump(), "out": str(out), "start": _end_of_lines(out / EVENTS)}
    _tell(process, request)
    return process


def _tell(process: subprocess.Popen[bytes], message: Mapping[str, Any]) -> None:
    assert process.stdin is not None, "stdin is a pipe"
    with contextlib.suppress(OSError):  # it has ended
        process.stdin.write(json.dumps(message).encode() + b"\n")
        process.stdin.flush()


def _end(process: subprocess.Popen[bytes], error: str) -> None:
    """Wait until the end of the run has been passed on."""
    _tell(process, {"error": error})
    try:
        process.wait(CLOSE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None, "stdin is a pipe"
    with contextlib.suppress(OSError):
        process.stdin.close()


def _end_of_lines(path: Path) -> int:
    """Offset behind the last complete line of a file; 0 without one."""
    try:
        with open_regular(path, within=path.parent) as file:
            return file.read().rfind(b"\n") + 1
    except UnreadableFile:
        return 0


# -- the process ---------------------------------------------------------------------------------


@dataclass
class AlertSender:
    """Passes events on; what goes wrong is said once for each way, and ends nothing.

    Attributes:
        run: the name of the run in alerts.
    """

    alert: AlertConfig
    run: str
    limit: AlertLimit = field(default_factory=AlertLimit)
    warned: set[str] = field(default_factory=set)

    def send(self, event: Mapping[str, Any], *, now_s: float) -> None:
        """Pass an event on, unless one of its kind was less than a minute ago."""
        if not self.limit.admits(event, now_s=now_s):
            return
        body = payload(event, run=self.run, dropped=self.limit.take_dropped(event)).encode()
        if self.alert.command is not None:
            self._warn("alert.command", _failure_of_command(self.alert.command, body))
        if self.alert.url is not None:
            self._warn("alert.url", _failure_of_post(expanded(self.alert.url, os.environ), body))

    def _warn(self, key: str, failure: str) -> None:
        if failure and key not in self.warned:
            self.warned.add(key)
            with contextlib.suppress(OSError):
                sys.stderr.write(f"warning: {key}: {failure}. Training goes on\n")
                sys.stderr.flush()


def _failure_of_command(command: str, body: bytes) -> str:
    """Run a command with the JSON on its standard input; why it has failed, "" if it has not."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's command, without a shell
            shlex.split(command),
            input=body + b"\n",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"has not ended within {LIMIT_S:g} s, and was ended"
    except OSError as error:
        return f"cannot be run: {error.strerror}"
    return f"exit code {done.returncode}" if done.returncode else ""


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """What is posted goes to the URL that the user has named and to no other."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """Follow no redirect: it becomes an error."""
        return


def _failure_of_post(url: str, body: bytes) -> str:
    """Send the JSON by POST; why that has failed, "" if it has not. The URL is no part of it."""
    try:
        request = urllib.request.Request(  # noqa: S310 - http or https: checked before the start
            url, data=body, headers={"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.build_opener(NoRedirect).open(request, timeout=LIMIT_S):
            return ""
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except urllib.error.URLError as error:
        return f"cannot be reached: {error.reason}"
    except (OSError, ValueError) as error:
        return f"cannot be reached: {type(error).__name__}"


def main(requests: FileIO) -> None:
    """Follow the events of a run until its process says that it has ended, or has gone; then pass on
    its end.
    """
    first = json.loads(requests.readline())
    sender = AlertSender(AlertConfig(**first["alert"]), first["out"])
    path = Path(first["out"], EVENTS)
    position = first["start"]
    has_ended = False
    while not has_ended:
        has_ended = bool(select.select([requests], [], [], POLL_S)[0])
        for event, end in _new_events(path, position):
            position = end
            if event.get("event") in KINDS:
                sender.send(event, now_s=time.monotonic())
    last_words = requests.readline()
    error = json.loads(last_words)["error"] if last_words else ""
    if not last_words:
        time.sleep(SETTLE_S)  # the process was killed
        error = NO_END
    last = _end_event(path, first["start"], error)
    if last:
        sender.send(last, now_s=time.monotonic())


def _new_events(path: Path, start: int) -> Iterator[tuple[dict[str, Any], int]]:
    """Each event from an offset on, with the offset behind its line."""
    try:
        with open_regular(path, within=path.parent) as file:
            file.seek(start)
            for line in file.read().splitlines(keepends=True):
                if not line.endswith(b"\n"):
                    return
                start += len(line)
                found: Any = None
                with contextlib.suppress(ValueError):  # a line that was replaced
                    found = json.loads(line)
                if isinstance(found, dict):
                    yield found, start
    except UnreadableFile:
        return


def _end_event(path: Path, start: int, error: str) -> Mapping[str, Any]:
    """The `end` event that the run has written since its start; one with the error of its process
    where it has written none.
    """
    events = [event for event, _ in _new_events(path, start)]
    if events and events[-1].get("event") == "end":
        return events[-1]
    steps = [event["step"] for event in events if event.get("event") == "step" and "step" in event]
    if not error:
        return {}
    return {"event": "end", "status": "failed", "steps": max(steps, default=0), "error": error}


if __name__ == "__main__":
    with open(
        sys.stdin.fileno(), "rb", buffering=0
    ) as pipe:  # select sees what a buffer would hold
        main(pipe)
