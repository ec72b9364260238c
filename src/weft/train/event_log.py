"""Event log of a run: events.jsonl, one JSON object per line, and the text files beside it in the run folder.

An event is a flat dict with an "event" key:

    run     first, and again at each resume: model, params, layout, why, plan, ranks, device, data, seed, steps, start_step,
            seq_len, batch_size, out; memory_bytes (of the device, or the machine) and memory_ranks (that share it);
            mesh_order (where the order of the axes is bad on the nodes); where steps have mfu:
            model_flops (of a step), peak_tflops (of a device), mfu_text
    step    step (the first is 1), loss, grad_norm, lr, tokens, tokens_per_s, step_s, mem_bytes, stage_mem_bytes, loss_scale,
            skipped (no update: float16 gradients overflowed at that scale, or a guard skipped it), mfu (model FLOPs as a
            share of the devices' bfloat16 peak, 0 to 1; from the third step on where the peak is known)
    prediction  once, after the first steps of a run with `hardware`: hardware, source (of its constants), step_s, low_s,
            high_s, peak_bytes, rank_0_peak_bytes, stage_peak_bytes, mesh_order (predicted); measured_s, measured_bytes
            (of memory_of); text
    eval    step, loss (mean over all targets), perplexity (not of preference pairs), tokens (targets, or pairs), seconds: on
            validation data
    proof   verdict (equal, different, unknown), text, reason (where it is not equal); of a step that was compared: step, and what
            was; of the proof before the first step: compared (tensors), steps, seconds, source
    sample  step, prompt, text: what the model generates after that step; seconds
    note    text: a line for the reader
    save    step, path, bytes, stall_s (training waited), write_s (until it was on the disk), remote (URL of the copy, if the
            run makes copies)
    save_failed  step, why, need_bytes, free_bytes, newest (the newest checkpoint that exists): training goes on
    resume  step, path (null: no checkpoint yet, a new run starts), layout (that wrote it), passed_over (newer, damaged):
            steps above `step` before this line are of a run that was killed; `step_history` leaves
            them out
    guard   kind, step, action (report, skip, rollback, stop), text; a resume event follows a rollback. Further fields:
            nonfinite, spike: loss, grad_norm, batch (number), samples; rank, block, place (output, gradient, sum)
            digest: rank, ranks, tensors
            straggler: rank, coordinates, host, busy_s, others_s, ratio
    restart attempt (of how many: of), step, source (memory, checkpoint or start), rank, reason, detected_s, recovered_s: the
            ranks were started again; steps above `step` before this line are trained again, as after
            a resume
    end     last: status (finished, stopped, failed, interrupted), steps, seconds; checkpoint (the newest) and text (a line for
            the reader), or error if it failed

An event is written by one call. A kill can cut that call short where a line crosses a page: readers
ignore an incomplete last line, and the next writer removes it. Numbers keep full precision. JSON
cannot express NaN and infinity: they are the strings "NaN", "Infinity" and "-Infinity", which
`float()` in Python and `Number()` in JavaScript read, and `read_events` converts.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from weft.checkpoint.disk import DISK_FULL_ERRNOS, replace_file
from weft.errors import Fault, LaunchError, WeftError
from weft.small_files import MIB, UnreadableFile, read_text
from weft.train.event_lines import STEP_COUNTING, read_events, read_run_events, to_line
from weft.view.progress import Event, View

EVENTS = "events.jsonl"
MAX_TEXT_BYTES = 16 * MIB
"""Size of a text file of the run folder that is compared with a new one."""
DEAD_AFTER_S = 2.0
"""Time that a writer whose lock is held has to write its `end` event."""
LOCK_POLL_S = 0.02
OUTPUT_GONE_ERRNOS = (errno.EIO, errno.EPIPE)
"""The terminal was closed; the reader of the pipe has ended."""


class EventLog:
    """Writes events to the run folder and passes them to every view; without a folder, to the views
    only.

    Used as a context manager it ends with an `end` event, also if an exception leaves it.

    Args:
        ends_on_error: False where a launcher writes that event, after it has decided that the ranks
            are not started again.

    Raises:
        LaunchError: the folder cannot be created or written.
    """

    def __init__(
        self, out: Path | None, views: Sequence[View] = (), *, ends_on_error: bool = True
    ) -> None:
        self.out = out
        self.views = tuple(views)
        self._file = None if out is None else LineFile(create_run_folder(out) / EVENTS)
        self._start_s = time.perf_counter()
        self._num_steps = 0
        self._has_ended = False
        self._ends_on_error = ends_on_error

    def emit(self, event: Event) -> None:
        """Write one event and pass it to the views."""
        if event["event"] in STEP_COUNTING:
            self._num_steps = int(event.get("step", self._num_steps))
        self._has_ended = event["event"] == "end"
        if self._file is not None:
            self._file.write(to_line(event))
        self._show(event)

    def note_after_end(self, text: str) -> None:
        """Pass a note to the views; the `end` event stays the last one of the file."""
        self._show({"event": "note", "text": text})

    def _show(self, event: Event) -> None:
        """Pass an event to the views; one whose terminal or pipe is gone gets no more."""
        for view in self.views:
            try:
                view.handle(event)
            except OSError as error:
                if error.errno not in OUTPUT_GONE_ERRNOS:
                    raise
                self.views = tuple(other for other in self.views if other is not view)

    def end(self, status: str, **fields: Any) -> None:
        """Write the `end` event."""
        seconds = time.perf_counter() - self._start_s
        self.emit(
            {
                "event": "end",
                "status": status,
                "steps": self._num_steps,
                "seconds": seconds,
                **fields,
            }
        )

    def write(self, name: str, text: str) -> None:
        """Write the file `name` into the run folder, atomically."""
        if self.out is not None:
            replace_file(self.out / name, text)

    def write_versioned(self, name: str, text: str) -> None:
        """As `write`, but an existing file with another text is kept: run.toml as run-1.toml. One
        with this text is left as it is, so that ranks start again on a full disk.

        Raises:
            WeftError: the file cannot be written.
        """
        if self.out is None or _holds(self.out / name, text):
            return
        path = self.out / name
        try:
            replace_file(path, text, kept=_unused_version(path))
        except OSError as error:
            got = f"{str(self.out / name)!r}: {error.strerror}"
            fix = "free disk space, or choose another out"
            raise WeftError(str(Fault("out", "cannot write a file", got=got, fix=fix))) from error

    def close(self) -> None:
        """Close the file and the views; may be called twice."""
        file, self._file = self._file, None
        if file is not None:
            lost_bytes = file.close()
            if lost_bytes:
                text = f"warning: the disk is full, and the last {lost_bytes:,} bytes of {EVENTS} are lost"
                self._show({"event": "note", "text": text})
        for view in self.views:
            with suppress(OSError):  # its terminal or pipe may be gone
                view.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        try:
            if error is not None and self._ends_on_error and not self._has_ended:
                status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                self.end(status, error=f"{type(error).__name__}: {error}")
        finally:
            self.close()


class LineFile:
    """A file to which whole lines are appended. On a full disk they wait in memory until there is
    room again.

    It is locked (flock) while it is open: the lock ends with the process, also when it is killed.
    """

    def __init__(self, path: Path) -> None:
        self._file = _open_for_append(path)
        # Events are written without the lock, too: some file systems have none.
        _lock(self._file)
        self._pending = b""

    def write(self, line: str) -> None:
        """Append a line, in one call with those that wait before it.

        Raises:
            OSError: any error but a full disk.
        """
        self._pending += line.encode()
        try:
            num_written = os.write(self._file, self._pending)
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            return
        self._pending = self._pending[num_written:]

    def close(self) -> int:
        """Close the file; returns the number of bytes that could not be written."""
        if self._pending:
            self.write("")
        os.close(self._file)
        return len(self._pending)


def create_run_folder(out: Path) -> Path:
    """Create `out` if it is missing and check that it can be written.

    Raises:
        LaunchError: it cannot be created or written.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            return out
    except OSError as error:
        got = f"{str(out)!r}: {error.strerror}"
        raise LaunchError(
            Fault("out", "cannot write to the run folder", got=got, fix="choose another out")
        ) from error


def append_end_event(out: Path, status: str, *, error: str = "", seconds: float = 0.0) -> bool:
    """Append an `end` event, behind the last complete line, for a run that was killed; False if it
    has one already.

    A failed rank 0 knows its own error alone, so the `error` of its `end` event is replaced.
    """
    path = out / EVENTS
    if not path.is_file():
        return False
    try:
        events = list(read_events(path))
    except UnreadableFile:
        return False
    except ValueError:  # a damaged line: the run gets its end event all the same
        events = []
    last = events[-1] if events else {}
    if last.get("event") == "end":
        if status == "failed" and last.get("status") == "failed":
            # The lines themselves, not the events again, so that every byte before the last line stays.
            lines = path.read_bytes().split(b"\n")[: len(events) - 1]
            kept = "".join(line.decode() + "\n" for line in lines)
            replace_file(path, kept + to_line({**last, "error": error}))
        return False
    end = {
        "event": "end",
        "status": status,
        "steps": _last_step_of(events),
        "seconds": seconds,
        "error": error,
    }
    file = LineFile(path)
    file.write(to_line(end))
    file.close()
    return True


def last_step(out: Path) -> int:
    """The last step that the events of a run record; 0 if they record none."""
    try:
        return _last_step_of(read_events(out / EVENTS))
    except (UnreadableFile, ValueError):
        return 0


def _last_step_of(events: Iterable[Event]) -> int:
    num_steps = 0
    for event in events:
        step = event.get("step")
        if event.get("event") in STEP_COUNTING and isinstance(step, int):
            num_steps = step
    return num_steps


def end_run_of_dead_writer(out: Path, *, error: str, wait_s: float = DEAD_AFTER_S) -> bool:
    """Append an `end` event for the process that wrote the events, if it has died without one.

    The writer is dead once its lock on the file is gone; a living one is given `wait_s` seconds to
    write its own end. Returns whether an event was appended.
    """
    path = out / EVENTS
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        deadline = time.perf_counter() + wait_s
        while not _lock(file):
            if time.perf_counter() > deadline:
                return False
            time.sleep(LOCK_POLL_S)
        return append_missing_end_event(out, error=error)
    finally:
        os.close(file)


def append_missing_end_event(out: Path, *, error: str) -> bool:
    """Append an `end` event with status "failed" to events without one; False if there is one, or
    no event at all.
    """
    path = out / EVENTS
    if not path.is_file():
        return False
    try:
        events = list(read_run_events(path))
    except (UnreadableFile, ValueError):  # damaged by others: nothing is known about its end
        return False
    if not events or events[-1]["event"] == "end":
        return False
    return append_end_event(out, "failed", error=error)


def _lock(file: int) -> bool:
    """Take the lock on a file; False if another process (or another opening) has it, or the file
    system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _open_for_append(path: Path) -> int:
    """Open for appending, after removing an incomplete last line; never through a symbolic link.

    Raises:
        LaunchError: it is no regular file, or cannot be written.
    """
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        file = os.open(path, flags, 0o666)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        reason = "a symbolic link" if is_link else error.strerror
        raise _not_writable(path, str(reason)) from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _not_writable(path, "not a regular file")
    os.ftruncate(file, _end_of_complete_lines(file))
    return file


def _not_writable(path: Path, reason: str) -> LaunchError:
    return LaunchError(
        Fault(
            "out",
            "cannot append events",
            got=f"{path}: {reason}",
            need="a regular file",
            fix="remove it, or choose another out",
        )
    )


def _end_of_complete_lines(file: int, block: int = 1 << 16) -> int:
    """Offset behind the last newline, searched from the end."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(end - block, 0)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _unused_version(path: Path) -> Path | None:
    """The name under which an existing file is kept: run-1.toml for run.toml, the next one
    run-2.toml. None if there is no file, or if it has the newest of these names already: then its
    replacement was interrupted.
    """
    if not os.path.lexists(path):
        return None
    newest = path
    for number in itertools.count(1):
        target = path.with_name(f"{path.stem}-{number}{path.suffix}")
        if not os.path.lexists(target):
            break
        newest = target
    is_same_file = os.path.samestat(os.lstat(path), os.lstat(newest))
    is_kept = newest != path and is_same_file
    return None if is_kept else target


def _holds(path: Path, text: str) -> bool:
    """Whether an existing file holds this text."""
    try:
        return read_text(path, max_bytes=MAX_TEXT_BYTES, within=path.parent) == text
    except UnreadableFile:
        return False
