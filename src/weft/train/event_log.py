"""Owns the run folder's text: events.jsonl line by line, and the files that stand beside it.

An event is a flat dict with an "event" key; the ones there are:

    run     first, and again at each resume: model, params, layout, why, plan, ranks, device, data, seed, steps, start_step,
            seq_len, batch_size, out
    step    step (the first is 1), loss, grad_norm, lr, tokens, tokens_per_s, step_s, mem_bytes, stage_mem_bytes, loss_scale,
            skipped (float16 overflowed at that scale: nothing was moved)
    eval    step, loss (mean over all targets), perplexity, tokens (targets), seconds: on what is not trained on
    sample  prompt, text: what the model writes
    note    text: a line for the reader
    save    step, path, bytes, stall_s (training stood still), write_s (until it was on the disk)
    save_failed  step, why, need_bytes, free_bytes, newest (the checkpoint that is there): training goes on
    resume  step, path (null: there was none, the run begins anew), layout (that wrote it), passed_over (newer, broken):
            steps above `step` that stand before this line are of a run that was killed; `course` leaves them out
    end     status (finished, stopped), steps, seconds

One line is one event, written by a single call. A kill can cut that call short where a line crosses a page: readers leave
the part of a last line out, and whoever goes on writing removes it. Numbers keep full precision. JSON has no
word for the numbers that are none: they are the strings "NaN", "Infinity" and "-Infinity", which `float()` in Python
and `Number()` in JavaScript read, and `read_events` turns back.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.checkpoint.disk import FULL
from weft.errors import Fault, LaunchError
from weft.view.progress import Event, View

EVENTS = "events.jsonl"
NO_NUMBERS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Journal:
    """Writes events to the run folder and hands them to every view; without a folder, to the views alone.

    Raises:
        LaunchError: the folder cannot be made or written.
    """

    def __init__(self, out: Path | None, views: Sequence[View] = ()) -> None:
        self.out, self.views = out, tuple(views)
        self._lines = None if out is None else Lines(open_folder(out) / EVENTS)

    def emit(self, event: Event) -> None:
        """Write one event and show it."""
        if self._lines is not None:
            self._lines.write(to_line(event))
        for view in self.views:
            view.handle(event)

    def write(self, name: str, text: str) -> None:
        """Put the file `name` into the run folder: whole or not at all."""
        if self.out is not None:
            _write_whole(self.out / name, text)

    def supersede(self, name: str, text: str) -> None:
        """As `write`, but another text that was there stays: run.toml as run-1.toml."""
        if self.out is not None:
            _keep_older(self.out / name, text)
            _write_whole(self.out / name, text)

    def close(self) -> None:
        """Close the file and the views; harmless when done twice."""
        lines, self._lines = self._lines, None
        if lines is not None and (lost := lines.close()):
            text = f"warning: the disk is full, and the last {lost:,} bytes of {EVENTS} are lost"
            for view in self.views:
                view.handle({"event": "note", "text": text})
        for view in self.views:
            view.close()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Lines:
    """A file that lines are added to. A full disk does not stop who writes: its lines wait until there is room again."""

    def __init__(self, path: Path) -> None:
        self._file, self._waiting = _open_lines(path), b""

    def write(self, line: str) -> None:
        """Add a line, by a single call, with those that wait before it.

        Raises:
            OSError: anything but a full disk.
        """
        self._waiting += line.encode()
        try:
            self._waiting = self._waiting[os.write(self._file, self._waiting) :]
        except OSError as error:
            if error.errno not in FULL:
                raise

    def close(self) -> int:
        """Close the file; returns the bytes for which there was no room to the end."""
        if self._waiting:
            self.write("")
        os.close(self._file)
        return len(self._waiting)


def open_folder(out: Path) -> Path:
    """`out`, made where it was missing and proved writable.

    Raises:
        LaunchError: it cannot be made or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        raise LaunchError(
            Fault(
                "out", "cannot write to the run folder", got=f"{str(out)!r}: {error.strerror}", fix="choose another out"
            )
        ) from error


def to_line(event: Mapping[str, Any]) -> str:
    """One event as one line of JSON."""
    return json.dumps(_spell(event), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a file in order; a last line that was cut short by a crash is left out.

    Raises:
        ValueError: a line before the last is damaged.
    """
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield _unspell(json.loads(line))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: damaged line {line[:80]!r}: {error}") from error


def course(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step events of a run as it stands: what a resume went back behind is left out."""
    steps: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "resume":
            steps = [step for step in steps if step["step"] <= event["step"]]
        elif event["event"] == "step":
            steps.append(event)
    return steps


def _open_lines(path: Path) -> int:
    """Open for appending; what a crash left of a last line goes first."""
    file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    os.ftruncate(file, _end_of_whole_lines(file))
    return file


def _end_of_whole_lines(file: int, block: int = 1 << 16) -> int:
    """Where the last whole line ends, bytes from the start: looked for from the end."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - block, 0)
        if (newline := os.pread(file, end - start, start).rfind(b"\n")) >= 0:
            return start + newline + 1
        end = start
    return 0


def _keep_older(path: Path, text: str) -> None:
    """Rename what is there, unless it says the same: run.toml -> run-1.toml, the next one run-2.toml."""
    if path.exists() and path.read_text(encoding="utf-8") != text:
        names = (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in range(1, 10_000))
        path.rename(next(name for name in names if not name.exists()))


def _write_whole(path: Path, text: str) -> None:
    """Write beside, flush to the disk, rename."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _spell(value: Any) -> Any:
    """`value` with the numbers that JSON does not know as their words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {key: _spell(inner) for key, inner in value.items()}
    return [_spell(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _unspell(value: Any) -> Any:
    if isinstance(value, str):
        return NO_NUMBERS.get(value, value)
    if isinstance(value, dict):
        return {key: _unspell(inner) for key, inner in value.items()}
    return [_unspell(inner) for inner in value] if isinstance(value, list) else value
