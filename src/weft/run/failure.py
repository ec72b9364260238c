"""Owns what is told of a rank that failed, and which of several failures came first."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weft.errors import CommError, MismatchError, RankError, UserError

# Note [Which failure came first]
# A rank that dies takes its connections along, and its peers fail within milliseconds: "connection closed by peer". These
# echoes say nothing of the cause. So a failure is an `echo` if it is about the talk between ranks (other than that they
# brought different things), and any other failure, however late, comes before the earliest echo. Among equals the clock
# decides; it is one clock for all processes of a machine. A rank that is killed cannot say anything: the parent notes when
# it found it dead.

Kind = Literal["user", "error", "echo"]

TRACE = "WEFT_TRACEBACK"
ECHOES = re.compile(
    r"[Cc]onnection (was )?(closed|reset|refused)|[Bb]roken pipe|gloo/transport|[Ss]ocket [Tt]imeout|NCCL .*(abort|remote)"
)
MOST_TEXT, MOST_TRACE = 4_000, 10_000
"""Characters; with both, a report fits into a pipe that nobody reads yet."""


@dataclass(frozen=True)
class Failure:
    """One rank's end.

    Attributes:
        at_s: when, on the machine's monotonic clock.
        text: the error in words.
        trace: the traceback, "" where there is none.
    """

    rank: int
    kind: Kind
    at_s: float
    text: str
    trace: str = ""


def describe(error: BaseException, *, rank: int, at_s: float) -> Failure:
    """What `error` says, so that it can travel to another process."""
    trace = "".join(traceback.format_exception(error))
    if isinstance(error, UserError):
        return Failure(rank, "user", at_s, str(error)[:MOST_TEXT], trace[-MOST_TRACE:])
    is_echo = isinstance(error, (CommError, ConnectionError)) and not isinstance(error, MismatchError)
    kind: Kind = "echo" if is_echo or ECHOES.search(str(error)) else "error"
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return Failure(rank, kind, at_s, f"{text[:MOST_TEXT]}{_place(error)}", trace[-MOST_TRACE:])


def _place(error: BaseException) -> str:
    """Where it was raised: ` [loop.py:31 in train_on_ranks]`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" [{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}]" if frames else ""


def describe_exit(code: int, *, rank: int, at_s: float, trace: str = "") -> Failure:
    """What is known of a process that ended with `code` (minus a signal's number) and said nothing."""
    if code >= 0:
        return Failure(rank, "error", at_s, f"ended with exit code {code} and said nothing", trace)
    name = signal.Signals(-code).name
    guess = " (out of memory?)" if name == "SIGKILL" else ""
    return Failure(rank, "error", at_s, f"was killed by {name}{guess}", trace)


def first_of(failures: Iterable[Failure]) -> Failure:
    """The cause of all, see Note [Which failure came first]."""
    return min(failures, key=lambda failure: (failure.kind == "echo", failure.at_s))


def to_error(failure: Failure, where: str, *, out: Path | None, show_trace: bool) -> RankError:
    """The one error that the person sees; the traceback goes to the run folder, or below it when asked for."""
    text = failure.text
    if failure.trace and show_trace:
        text += f"\n{failure.trace.rstrip()}"
    elif failure.trace and failure.kind != "user":
        text += f"\n  traceback: {_keep_trace(failure, out)}"
    return RankError(failure.rank, where, text, kind="user" if failure.kind == "user" else "failure")


def _keep_trace(failure: Failure, out: Path | None) -> str:
    """Put the traceback into the run folder; where it went, or how to see it."""
    if out is not None and out.is_dir():
        path = out / f"traceback-rank{failure.rank}.txt"
        path.write_text(failure.trace, encoding="utf-8")
        return str(path)
    return f"set {TRACE}=1 and run again"
