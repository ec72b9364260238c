"""Failures of ranks: a record that can be sent between processes, the root cause among several, the error it becomes."""

from __future__ import annotations

import os
import re
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.checkpoint.disk import replace_file
from weft.core.mesh import Mesh
from weft.errors import (
    CommError,
    CorruptionError,
    GuardError,
    MismatchError,
    RankError,
    RankErrorKind,
    SaveError,
    UserError,
)

# Note [Root cause of a failed run]
# The connections of a rank that dies are closed, and its peers fail within milliseconds: "connection closed by peer".
# These secondary failures say nothing about the cause. So a failure is `secondary` if it is about communication (except a
# mismatch of collectives), and any other failure, however late, comes before the earliest secondary one. Among failures
# of one kind the earliest is the cause; all processes of a machine share one monotonic clock. A rank that is killed sends
# no report: its parent records when it found the process dead.

Kind = Literal["user", "all ranks", "corruption", "error", "secondary"]

NO_LOCATION_KINDS = ("user", "all ranks", "corruption")
"""Failures whose message suffices: no exception name, source line or traceback. All ranks have them."""
REPEATED_KINDS = ("user", "all ranks")
"""Failures that come back when the ranks are started again."""

TRACE_VARIABLE = "WEFT_TRACEBACK"
"""Environment variable: print tracebacks below errors."""

SECONDARY = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe|gloo/transport|[Ss]ocket [Tt]imeout|NCCL .*(abort|remote)"
)
GLOO_ADVICE = re.compile(r"\. This is typically caused by a remote worker .*?GLHF!\s*[^\s\w)\]]*")
"""What gloo adds to "Connection closed by peer" and "Connection reset by peer"."""
MAX_TEXT = 4_000
MAX_TRACE = 10_000
"""Characters. A report of this size fits into the buffer of a pipe that is not read yet."""


@dataclass(frozen=True)
class RankFailure:
    """How one rank failed.

    Attributes:
        at_s: time on the machine's monotonic clock.
        text: the error message and where it was raised.
        trace: the traceback, "" if there is none.
        exception: the pickled exception, for `run_ranks`, which raises it again; b"" elsewhere.
    """

    rank: int
    kind: Kind
    at_s: float
    text: str
    trace: str = ""
    exception: bytes = b""


@dataclass(frozen=True)
class ErrorContext:
    """What an error message needs besides the failure: the mesh for coordinates, the run folder for
    the traceback.
    """

    mesh: Mesh | None = None
    out: Path | None = None

    def to_error(self, failure: RankFailure) -> RankError:
        """The error that the user sees. The traceback is written to the run folder, or shown if
        WEFT_TRACEBACK is set.
        """
        lines = [failure.text]
        if failure.trace and os.environ.get(TRACE_VARIABLE):
            lines.append(failure.trace.rstrip())
        elif failure.trace and failure.kind not in NO_LOCATION_KINDS:
            lines.append(f"  traceback: {self._save_trace(failure)}")
        kind: RankErrorKind = "failure"
        if failure.kind == "user":
            kind = "user"
        elif failure.kind in NO_LOCATION_KINDS:
            kind = "all ranks"
        return RankError(failure.rank, self._coordinates(failure.rank), "\n".join(lines), kind=kind)

    def lost_rank(self, lost: int, failure: RankFailure) -> RankError:
        """The error about a rank that another one has found missing: it begins with the lost one."""
        finder = self.to_error(failure)
        place = f"rank {finder.rank}"
        if finder.where:
            place = f"{place} ({finder.where})"
        message = f"lost; found by {place}: {finder.message}"
        return RankError(lost, self._coordinates(lost), message)

    def _coordinates(self, rank: int) -> str:
        """The rank's mesh coordinates; "" on a single rank."""
        if self.mesh is None:
            return "no mesh"
        return self.mesh.coord_text(rank) if self.mesh.size > 1 else ""

    def _save_trace(self, failure: RankFailure) -> str:
        """Write the traceback to the run folder; its path, or how to see the traceback where the
        folder is missing or the disk is full.
        """
        see_again = f"set {TRACE_VARIABLE}=1 and run again"
        if self.out is None or not self.out.is_dir():
            return see_again
        path = self.out / f"traceback-rank{failure.rank}.txt"
        try:
            replace_file(path, failure.trace)
        except OSError as error:
            return f"not written ({error.strerror}); {see_again}"
        return str(path)


def describe_error(error: BaseException, *, rank: int, at_s: float) -> RankFailure:
    """The record of an exception that `rank` raised."""
    kind = _kind_of(error)
    text = GLOO_ADVICE.sub("", str(error))
    if kind not in NO_LOCATION_KINDS:
        name = type(error).__name__
        text = f"{name}: {text}" if text else name
    text = text[:MAX_TEXT]
    if kind not in NO_LOCATION_KINDS:
        text += _location(error)
    # its end is kept below: the innermost frames, and the message
    trace = "".join(traceback.format_exception(error))
    return RankFailure(rank, kind, at_s, _encodable(text), _encodable(trace[-MAX_TRACE:]))


def _encodable(text: str) -> str:
    """The text with lone surrogates (of file names that are no UTF-8) written out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _kind_of(error: BaseException) -> Kind:
    if isinstance(error, UserError):
        return "user"
    if isinstance(error, CorruptionError):
        return "corruption"
    if isinstance(error, GuardError | SaveError):
        return "all ranks"
    if isinstance(error, MismatchError):
        return "error"
    if isinstance(error, (CommError, ConnectionError)):
        return "secondary"
    if SECONDARY.search(str(error)):
        return "secondary"
    return "error"


def _location(error: BaseException) -> str:
    """Where the error was raised: ` [loop.py:31 in train_on_ranks]`."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return ""
    frame = frames[-1]
    return f" [{Path(frame.filename).name}:{frame.lineno} in {frame.name}]"


def describe_exit(code: int, *, rank: int, at_s: float, trace: str = "") -> RankFailure:
    """The record of a process that ended with `code` (a signal's number negated) and sent no
    report.
    """
    if code >= 0:
        text = f"process exited with code {code} before its function returned"
    else:
        text = f"process was killed by {_signal_name(-code)}"
    if code == -signal.SIGKILL:
        text += " (out of memory?)"
    return RankFailure(rank, "error", at_s, text, trace)


def _signal_name(number: int) -> str:
    """SIGSEGV; of most real-time signals, which have no name, the number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure that caused the others, see Note [Root cause of a failed run]."""
    # False comes first: any other failure before all secondary ones
    return min(failures, key=lambda failure: (failure.kind == "secondary", failure.at_s))
