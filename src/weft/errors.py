"""Exceptions of weft, exit codes, and `Fault`: one problem with its key, value, need and fix.

WeftError
├── UserError            invalid input: exit code 2, one line a fault, before any rank starts
│   ├── ConfigError      a key of the run config
│   ├── MeshError        the mesh text, or a coordinate outside the mesh
│   ├── PlanError        parts that are valid alone and do not fit together
│   ├── ScheduleError    a table of actions that is incomplete or deadlocks
│   ├── DataError        a source that is missing, empty, too short or out of range
│   ├── CheckpointError  a checkpoint that is missing, broken, of another model or of a newer format
│   └── LaunchError      ranks, ports, folders, devices
├── CommError            a failure of communication between ranks
│   ├── MismatchError    ranks disagree about a collective: operation, shape or dtype
│   └── CommTimeout      ranks that did not arrive
├── SaveError            the last step could not be saved, on all ranks
├── GuardError           a guard stopped the run, on all ranks
│   ├── NonFiniteError   the loss or the gradient norm of a training step is NaN or infinite
│   ├── CorruptionError  replicas of the training state differ, or a bit of it flipped
│   └── ProofError       a step is not what one device computes
└── RankError            the first failing rank's error, with its coordinates
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

MAX_LINE_CHARS = 4000
"""Length of the line of a fault: names and values of the input may have any length."""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_PREEMPTED = 75
"""Saved and stopped, or a temporary fault: start it again."""
EXIT_INTERRUPTED = 130
EXIT_QUIT = 131


@dataclass(frozen=True)
class Fault:
    """One problem and its remedy: `key: what (got ...; need ...). Fix: ...`; the key may be empty.

    Attributes:
        is_temporary: whether the same command may succeed later: then the exit code is 75, for
            programs that start it again.
    """

    key: str
    what: str
    got: str = ""
    need: str = ""
    fix: str = ""
    is_temporary: bool = field(default=False, kw_only=True)

    def __str__(self) -> str:
        details = []
        if self.got:
            details.append(f"got {self.got}")
        if self.need:
            details.append(f"need {self.need}")
        line = f"{self.key}: {self.what}" if self.key else self.what
        if details:
            line += f" ({'; '.join(details)})"
        if self.fix:
            line += f". Fix: {self.fix}"
        return printable(" ".join(line.split()))


def printable(line: str) -> str:
    """The line with control characters (terminal escapes, text direction) written out, and shortened
    in the middle where it is too long.
    """
    if len(line) > MAX_LINE_CHARS:
        half = MAX_LINE_CHARS // 2
        line = f"{line[:half]} ... {line[-half:]}"
    if line.isprintable():
        return line
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in line
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message; "" where it has none."""
    return str(error).strip().partition("\n")[0]


def type_and_message(error: BaseException) -> str:
    """Type of an error and the first line of its message: `ValueError: not a number`; with the next
    one, the reason, where it ends in a colon.
    """
    name = type(error).__name__
    message = first_line(error)
    if message.endswith(":"):
        reason = str(error).strip().removeprefix(message).strip()
        first, _, _ = reason.partition("\n")
        message = f"{message} {first}".rstrip(" :")
    return f"{name}: {message}" if message else name


class WeftError(Exception):
    """Root of every error that weft raises on purpose."""


class UserError(WeftError):
    """One or more faults of the input; all of them are reported together."""

    def __init__(self, *faults: Fault) -> None:
        self.faults = faults
        super().__init__("\n".join(map(str, faults)))

    def __reduce__(self) -> tuple[type[UserError], tuple[Fault, ...]]:
        return type(self), self.faults


class ConfigError(UserError):
    """A key of the run config is unknown, missing, of the wrong type or out of range."""


class MeshError(UserError):
    """A mesh text cannot be read, or a coordinate lies outside the mesh."""


class PlanError(UserError):
    """Parts that are valid alone and do not fit together."""


class ScheduleError(UserError):
    """A schedule table is incomplete, doubled, misplaced or deadlocks."""


class DataError(UserError):
    """A data source is missing, empty, too short, or holds tokens that the model cannot take."""


class CheckpointError(UserError):
    """A checkpoint is missing, broken, of another model or of a newer format; the fault names file
    and tensor.
    """


class LaunchError(UserError):
    """Ranks cannot be started: world size, port, folder or device."""


class SaveError(WeftError):
    """The last step of a run could not be saved, on all ranks; the message names where its state is
    kept. Training again does not make room, so ranks are not started again for it.
    """


class GuardError(WeftError):
    """A guard of the training run stopped it, on all ranks."""


class NonFiniteError(GuardError):
    """The loss or the gradient norm of a training step is NaN or infinite; the message names where
    it appeared first.
    """


class CorruptionError(GuardError):
    """Replicas of the training state differ, or it changed between two updates."""


class ProofError(GuardError):
    """A step of the run is not what one device computes; nothing was updated by it."""


class CommError(WeftError):
    """A failure of communication between ranks.

    Attributes:
        missing: world ranks that had not joined the call, as far as is known.
    """

    missing: tuple[int, ...] = ()


class MismatchError(CommError):
    """Ranks of one group entered different collectives, or the same with other shapes or dtypes."""


class CommTimeout(CommError):  # noqa: N818 - the field says time-out
    """Some ranks did not arrive at a collective in time; the message names them."""


RankErrorKind = Literal["user", "all ranks", "failure"]


class RankError(WeftError):
    """The first failing rank's error, carried to the parent with the rank's coordinates.

    `kind` is "user" when that error was a UserError, so that the exit code can follow, and
    "all ranks" when every rank raised it, so that the message names no rank. `where` may be empty.
    """

    def __init__(
        self, rank: int, where: str, message: str, *, kind: RankErrorKind = "failure"
    ) -> None:
        self.rank, self.where, self.message, self.kind = rank, where, message, kind
        place = f"rank {rank} ({where})" if where else f"rank {rank}"
        super().__init__(message if kind == "all ranks" else f"{place}: {message}")

    def __reduce__(self) -> tuple[object, ...]:
        return _rank_error, (self.rank, self.where, self.message, self.kind)


def _rank_error(rank: int, where: str, message: str, kind: RankErrorKind) -> RankError:
    return RankError(rank, where, message, kind=kind)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?` for the nearest known word in any case, else the list of known words.

    >>> did_you_mean("1F1B", ["1f1b", "gpipe"])
    "did you mean '1f1b'?"
    """
    choices = sorted(known)
    word_of = {choice.lower(): choice for choice in reversed(choices)}
    near = difflib.get_close_matches(word.lower(), word_of, n=1, cutoff=0.6)
    return f"did you mean {word_of[near[0]]!r}?" if near else f"known: {', '.join(choices)}"


def counted(number: int, noun: str, plural: str = "", *, spec: str = "") -> str:
    """A number with its noun: `1 rank`, `2 ranks`, `3 batches` (with plural="batches").

    Args:
        spec: format of the number, such as "," for 1,000.
    """
    nouns = plural or f"{noun}s"
    return f"{number:{spec}} {noun if number == 1 else nouns}"
