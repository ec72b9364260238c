"""What one rank did in the profiled steps: records of phases, actions, blocks and calls, and their file. Imports no torch.

A file is JSON lines: the header (an object), then an array for each record, then `["end", number of records]`. Times are
whole nanoseconds after `origin_s` of the header, a time of the host's monotonic clock.

    ["phase", step, name, start]              until the next phase
    ["action", name, start, end]              F0.3, B0.3, I0.3 or W0.3, its waits among them
    ["block", name, start]                    forward or backward of a block, until the next one or the end of the action
    ["call", op, axis, ranks, bytes, communicator, start, started, wait, waited]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, NamedTuple

from weft.errors import Fault, UserError, printable
from weft.small_files import MIB, UnreadableFile, read_text

VERSION = 1
NANOSECOND = 1e-9
MOST_RECORDS = 400_000
"""Records of one rank; what comes after them is counted and left out."""
STOP = "stop"
"""The phase that ends the last one."""
MOST_BYTES = 128 * MIB


class PhaseRecord(NamedTuple):
    """A phase of a step begins; the one before it ends."""

    step: int
    name: str
    start: float


class ActionRecord(NamedTuple):
    """An action of the schedule, with the waits inside it."""

    name: str
    start: float
    end: float


class BlockStart(NamedTuple):
    """The forward or backward of a block begins."""

    name: str
    start: float


class CallRecord(NamedTuple):
    """A collective or message.

    Attributes:
        ranks: world ranks of the group; of a message (source, destination).
        num_bytes: of this rank's input, or of the output of a recv or broadcast.
        start, started: when the rank began to start it, and went on.
        wait, waited: when it began to wait for it, and knew that it was complete; `started` where it
            did not wait.
    """

    op: str
    axis: str
    ranks: tuple[int, ...]
    num_bytes: int
    communicator: str
    start: float
    started: float
    wait: float
    waited: float

    @property
    def is_p2p(self) -> bool:
        """Whether it is a message."""
        return self.op in ("send", "recv")


@dataclass(frozen=True)
class RecordHeader:
    """Where and how a rank was recorded.

    Attributes:
        profile: number of the profile in its run folder.
        mesh: of the run.
        first, end: steps that were to be recorded; `end` is not among them.
        clock: "host": when the rank ran it; "cuda": when the device did.
        origin_s: the zero of all times, seconds of the clock of this host.
        offset_s: what this clock is ahead of that of rank 0.
        offset_error_s: by which the offset may be wrong; 0 on the host of rank 0.
        num_left_out: records that the limit left out.
    """

    profile: int
    rank: int
    mesh: str
    first: int
    end: int
    host: str
    clock: str
    origin_s: float = 0.0
    offset_s: float = 0.0
    offset_error_s: float = 0.0
    num_left_out: int = 0
    version: int = VERSION


@dataclass(frozen=True)
class RankRecords:
    """The records of a rank, each kind in the order of its start; times in seconds of the clock of
    rank 0, after `origin_s` of the header.
    """

    header: RecordHeader
    phases: tuple[PhaseRecord, ...]
    actions: tuple[ActionRecord, ...]
    blocks: tuple[BlockStart, ...]
    calls: tuple[CallRecord, ...]

    def shifted(self, seconds: float) -> RankRecords:
        """The records with all times later by so many seconds."""
        return replace(
            self,
            phases=tuple(each._replace(start=each.start + seconds) for each in self.phases),
            actions=tuple(
                each._replace(start=each.start + seconds, end=each.end + seconds)
                for each in self.actions
            ),
            blocks=tuple(each._replace(start=each.start + seconds) for each in self.blocks),
            calls=tuple(
                each._replace(
                    start=each.start + seconds,
                    started=each.started + seconds,
                    wait=each.wait + seconds,
                    waited=each.waited + seconds,
                )
                for each in self.calls
            ),
        )

    def to_text(self) -> str:
        """The text of its file."""
        lines = [json.dumps(asdict(self.header))]
        lines.extend(json.dumps(line, separators=(",", ":")) for line in self._lines())
        lines.append(json.dumps(["end", len(lines) - 1]))
        return "\n".join(lines) + "\n"

    def _lines(self) -> Iterator[list[Any]]:
        for phase in self.phases:
            yield ["phase", phase.step, phase.name, _whole(phase.start)]
        for action in self.actions:
            yield ["action", action.name, _whole(action.start), _whole(action.end)]
        for block in self.blocks:
            yield ["block", block.name, _whole(block.start)]
        for call in self.calls:
            *facts, start, started, wait, waited = call
            yield ["call", *facts, *map(_whole, (start, started, wait, waited))]


def _whole(seconds: float) -> int:
    return round(seconds / NANOSECOND)


def file_name(rank: int) -> str:
    """The name of the file of a rank."""
    return f"rank-{rank:05d}.jsonl"


def read_records(path: Path) -> RankRecords:
    """Read the file of a rank.

    Raises:
        UserError: it is damaged or cut short, or of another version.
    """
    try:
        text = read_text(path, max_bytes=MOST_BYTES, within=path.parent)
        first, *lines = text.splitlines()
        fields = json.loads(first)
        records = [json.loads(line) for line in lines]
        if fields["version"] != VERSION or records.pop() != ["end", len(lines) - 1]:
            raise ValueError("another version, or cut short")
        header = RecordHeader(**fields)
        _check_types(header)
        return _of_lines(header, records)
    except (UnreadableFile, ValueError, TypeError, KeyError, IndexError) as error:
        what = "is no whole record of a rank"
        got = error.what if isinstance(error, UnreadableFile) else str(error)[:80]
        fix = "record steps again with --profile"
        raise UserError(Fault(str(path), what, got=printable(got), fix=fix)) from None


def _check_types(header: RecordHeader) -> None:
    """Every field has the type that it is declared with.

    Raises:
        ValueError: one has not.
    """
    kinds: dict[str, tuple[type, ...]] = {"int": (int,), "str": (str,), "float": (int, float)}
    for field in fields_of(header):
        value = getattr(header, field.name)
        if not isinstance(value, kinds[str(field.type)]) or value != value:
            raise ValueError(f"{field.name} is {value!r}")


def _of_lines(header: RecordHeader, lines: Iterable[list[Any]]) -> RankRecords:
    phases: list[PhaseRecord] = []
    actions: list[ActionRecord] = []
    blocks: list[BlockStart] = []
    calls: list[CallRecord] = []
    for kind, *fields in lines:
        match kind:
            case "phase":
                step, name, start = fields
                phases.append(PhaseRecord(_whole_number(step), _text(name), _seconds(start)))
            case "action":
                name, start, end = fields
                actions.append(ActionRecord(_text(name), _seconds(start), _seconds(end)))
            case "block":
                name, start = fields
                blocks.append(BlockStart(_text(name), _seconds(start)))
            case "call":
                calls.append(_call(*fields))
            case _:
                raise ValueError(f"there is no record {kind!r}")
    return RankRecords(header, tuple(phases), tuple(actions), tuple(blocks), tuple(calls))


def _call(
    op: object, axis: object, ranks: object, num_bytes: object, communicator: object, *times: object
) -> CallRecord:
    if not isinstance(ranks, list):
        raise ValueError(f"{ranks!r} are no ranks")
    start, started, wait, waited = map(_seconds, times)
    call = CallRecord(
        op=_text(op),
        axis=_text(axis),
        ranks=tuple(map(_whole_number, ranks)),
        num_bytes=_whole_number(num_bytes),
        communicator=_text(communicator),
        start=start,
        started=started,
        wait=wait,
        waited=waited,
    )
    if not call.ranks or (call.is_p2p and len(call.ranks) != 2):
        raise ValueError(f"{ranks!r} are no ranks of a call")
    return call


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is no text")
    return value


def _whole_number(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _seconds(value: object) -> float:
    return _whole_number(value) * NANOSECOND
