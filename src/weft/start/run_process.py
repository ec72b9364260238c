"""A run in a process of its own, for callers that must not be forked: it is started, followed by its events, and ended."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import cloudpickle  # noqa: TID251 - between this process and its own child

from weft.errors import EXIT_FAILED, EXIT_OK, EXIT_PREEMPTED, EXIT_USER, UserError, WeftError
from weft.start.auto_mesh import choose_before_ranks
from weft.start.auto_recompute import choose_recompute_before_ranks
from weft.start.checked_run import load_checked_run
from weft.start.given_values import model_name
from weft.start.rules.start_checks import data_checks, environment_checks
from weft.start.train_checked import train_checked
from weft.train.event_log import EVENTS

POLL_S = 0.05
CHILD = "from weft.start.run_process import train_as_child; train_as_child()"


@dataclass(frozen=True)
class RunProcess:
    """What a run in a process of its own starts from.

    Attributes:
        words: of the command line, and `values` of keys beside them.
        out: the run folder.
        own_model: a model that is a value; None: the config names the model.
    """

    words: Sequence[str]
    values: Mapping[str, Any]
    out: Path
    own_model: Any


def steps_of_process(process: RunProcess) -> Generator[Mapping[str, Any]]:
    """Train in a process of its own; yields the events of steps. Where the caller ends the loop early,
    the run is asked to stop, and saves.

    Raises:
        WeftError: the training failed.
    """
    with tempfile.TemporaryFile() as output, tempfile.NamedTemporaryFile() as failure:
        payload = cloudpickle.dumps((process, failure.name))
        child = subprocess.Popen(  # noqa: S603 - this Python, with a module of weft
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert child.stdin is not None, "stdin is a pipe"
        with child.stdin as pipe:
            pipe.write(payload)
        events = process.out / EVENTS
        seen = _num_events(events)
        try:
            yield from _follow(events, child, skip=seen)
        finally:
            code = _end(child)
        if code not in (EXIT_OK, EXIT_PREEMPTED):
            raise _failure_of(Path(failure.name), code, output)


def _num_events(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _follow(
    path: Path, child: subprocess.Popen[bytes], *, skip: int
) -> Iterator[Mapping[str, Any]]:
    """The step events that a process writes, until it ends."""
    position = 0
    number = 0
    while True:
        has_ended = child.poll() is not None
        for line in _whole_lines(path, position):
            position += len(line)
            number += 1
            event = json.loads(line)
            if number > skip and event["event"] == "step":
                yield event
        if has_ended:
            return
        time.sleep(POLL_S)


def _whole_lines(path: Path, position: int) -> list[bytes]:
    """The lines from a position on that are complete."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        file.seek(position)
        lines = file.read().splitlines(keepends=True)
    return [line for line in lines if line.endswith(b"\n")]


def _end(child: subprocess.Popen[bytes]) -> int:
    """Wait for a process; one that still runs is asked to stop, and saves."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
    return child.wait()


LAST_LINES = 20
"""Of the output of a process that has printed no error."""


def _failure_of(path: Path, code: int, output: IO[bytes]) -> WeftError:
    """The error that the process of a run has written; else what it has printed last."""
    written = path.read_bytes()
    if written:
        error: WeftError = cloudpickle.loads(written)
        return error
    output.seek(0)
    lines = output.read().decode(errors="replace").splitlines()
    return WeftError("\n".join(lines[-LAST_LINES:]) or f"the run ended with code {code}")


def train_as_child() -> None:
    """Entry point of the process of a run: reads its config and model, and trains."""
    process, failure_path = cloudpickle.load(sys.stdin.buffer)
    if process.own_model is not None:
        model_name(process.own_model)
    values = {**process.values, "out": str(process.out)}
    try:
        run = load_checked_run(
            process.words,
            data_checks,
            environment_checks,
            values=values,
            choose_mesh=choose_before_ranks,
            choose_recompute=choose_recompute_before_ranks,
        )
        code = train_checked(run).code
        gc.freeze()  # as at the end of `weft train`
        sys.exit(code)
    except WeftError as error:
        Path(failure_path).write_bytes(cloudpickle.dumps(error))
        sys.exit(EXIT_USER if isinstance(error, UserError) else EXIT_FAILED)
