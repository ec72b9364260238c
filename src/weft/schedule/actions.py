"""Pipeline schedule tables: actions (`Act`), which action needs which (`needs`), and one row of actions a rank (`Table`)."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

from weft.errors import Fault, ScheduleError

Kind = Literal["F", "B", "I", "W"]
KIND_MEANING: dict[Kind, str] = {
    "F": "forward",
    "B": "backward: gradients of input and weights",
    "I": "backward: gradient of the input only",
    "W": "backward: gradients of the weights only",
}
KEY = "pipeline.schedule"

StageAndMicrobatch = tuple[int, int]


class Act(NamedTuple):
    """One action of a schedule: `F0.3` is the forward of micro-batch 3 through stage 0."""

    kind: Kind
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.mb}"

    @staticmethod
    def parse(text: str) -> Act:
        """Read an action as `F0.3`: kind, stage, micro-batch.

        Raises:
            ScheduleError: when `text` is no action.
        """
        match = re.fullmatch(r"([FBIW])(\d{1,9})\.(\d{1,9})", text)
        if match is None:
            fault = Fault(
                KEY,
                f"cannot read the action {text!r}",
                need="like F0.3: F, B, I or W, then stage.micro-batch",
                fix="correct it, or take it out",
            )
            raise ScheduleError(fault)
        kind, stage, mb = match.groups()
        return Act(cast(Kind, kind), int(stage), int(mb))


def needs(
    act: Act, *, num_stages: int, splits: Container[StageAndMicrobatch] = ()
) -> tuple[Act, ...]:
    """Actions whose results `act` uses: it can start when all of them are done.

    Args:
        splits: (stage, micro-batch) pairs whose backward is split into I, then W; the others run B.
            A table may mix both.
    """
    kind, stage, mb = act
    if kind == "F" and stage == 0:
        return ()
    if kind == "F":
        return (Act("F", stage - 1, mb),)
    if kind == "W":
        return (Act("I", stage, mb),)
    own_forward = Act("F", stage, mb)
    next_stage = stage + 1
    if next_stage == num_stages:
        return (own_forward,)
    # a whole backward and the input half of a split one yield the same gradient: either is enough here
    next_is_split = (next_stage, mb) in splits
    next_backward = Act("I" if next_is_split else "B", next_stage, mb)
    return own_forward, next_backward


_HEADER_LINE = re.compile(r"(microbatches|stage_to_rank|home)((?:\s+\d{1,9})+)")
_ROW_LINE = re.compile(r"rank\s+(\d{1,9})\s*:(.*)")


@dataclass(frozen=True)
class Table:
    """What each pipeline rank computes, in order.

    Attributes:
        rows: one row of actions for each pp coordinate.
        stage_to_rank: `stage_to_rank[stage]` is the pp coordinate that owns the stage.
        microbatches: every stage runs micro-batches 0 to `microbatches` - 1.
    """

    rows: tuple[tuple[Act, ...], ...]
    stage_to_rank: tuple[int, ...]
    microbatches: int

    @staticmethod
    def of_rows(
        rows: Iterable[Iterable[Act]], *, stage_to_rank: Iterable[int], microbatches: int
    ) -> Table:
        """The table of these rows, in rank order."""
        return Table(
            rows=tuple(map(tuple, rows)),
            stage_to_rank=tuple(stage_to_rank),
            microbatches=microbatches,
        )

    @property
    def num_ranks(self) -> int:
        """Number of pp coordinates."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.stage_to_rank)

    @property
    def actions(self) -> Iterator[Act]:
        """All actions, row after row."""
        for row in self.rows:
            yield from row

    @cached_property
    def splits(self) -> frozenset[StageAndMicrobatch]:
        """(stage, micro-batch) pairs whose backward is split into I and W."""
        found: set[StageAndMicrobatch] = set()
        for act in self.actions:
            if act.kind in ("I", "W"):
                found.add((act.stage, act.mb))
        return frozenset(found)

    def rank_of(self, act: Act) -> int:
        """The pp coordinate that runs `act`."""
        return self.stage_to_rank[act.stage]

    def stages(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` owns, ascending."""
        owned: list[int] = []
        for stage, owner in enumerate(self.stage_to_rank):
            if owner == rank:
                owned.append(stage)
        return tuple(owned)

    def needs(self, act: Act) -> tuple[Act, ...]:
        """`needs` with this table's number of stages and splits."""
        return needs(act, num_stages=self.num_stages, splits=self.splits)

    def source(self, act: Act) -> Act | None:
        """The action of a neighbouring stage whose tensor is the input of `act`, if there is one."""
        for need in self.needs(act):
            if need.stage != act.stage:
                return need
        return None

    @property
    def text(self) -> str:
        """The text that `parse` reads back."""
        owners = " ".join(map(str, self.stage_to_rank))
        lines = [f"microbatches {self.microbatches}", f"stage_to_rank {owners}"]
        for rank, row in enumerate(self.rows):
            lines.append(f"rank {rank}: {row_text(row)}")
        text = "\n".join(lines)
        return f"{text}\n"

    @staticmethod
    def parse(text: str) -> Table:
        """Read the text form: `microbatches 2`, `stage_to_rank 0 1`, then `rank 0: F0.0 B0.0 ...`
        for each rank.

        `#` starts a comment. `home` is read as an older word for `stage_to_rank`.

        Raises:
            ScheduleError: with the first line that cannot be read.
        """
        header: dict[str, tuple[int, ...]] = {}
        rows: list[tuple[Act, ...]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            content = line.partition("#")[0].strip()
            header_match = _HEADER_LINE.fullmatch(content)
            row_match = _ROW_LINE.fullmatch(content)
            if header_match:
                word, numbers = header_match.groups()
                key = "stage_to_rank" if word == "home" else word
                if key in header:
                    raise ScheduleError(
                        Fault(
                            KEY,
                            f"line {number} repeats {key}",
                            got=repr(line),
                            fix="leave one line of it",
                        )
                    )
                header[key] = tuple(map(int, numbers.split()))
            # rows in order: a rank that is left out shows where it is missing
            elif row_match and int(row_match[1]) == len(rows):
                rows.append(parse_row(row_match[2]))
            elif content:
                fault = Fault(
                    KEY,
                    f"cannot read line {number} of the table",
                    got=repr(line),
                    need=f"'microbatches N', 'stage_to_rank 0 1 ...' or 'rank {len(rows)}: F0.0 ...'",
                    fix="weft schedule 1f1b --ranks 2 --text FILE, which writes one to start from",
                )
                raise ScheduleError(fault)
        microbatches = header.get("microbatches", ())
        if len(microbatches) != 1 or "stage_to_rank" not in header:
            fault = Fault(
                KEY,
                "the table has no header",
                need="lines 'microbatches N' and 'stage_to_rank 0 1 ...'",
                fix="add them at the top",
            )
            raise ScheduleError(fault)
        return Table(tuple(rows), header["stage_to_rank"], microbatches[0])

    def to_json(self) -> str:
        """The JSON that `from_json` reads back; rows are written as text."""
        fields = {
            "microbatches": self.microbatches,
            "stage_to_rank": self.stage_to_rank,
            "rows": [row_text(row) for row in self.rows],
        }
        return json.dumps(fields)

    @staticmethod
    def from_json(text: str) -> Table:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is no JSON, or numbers are no whole numbers.
        """
        fields = json.loads(text)
        numbers = [fields["microbatches"], *fields["stage_to_rank"]]
        # JSON's true and 1.0 are equal to whole numbers and would pass as such
        if not all(type(number) is int for number in numbers):
            raise ValueError("microbatches and stage_to_rank are whole numbers")
        return Table.of_rows(
            map(parse_row, fields["rows"]),
            stage_to_rank=fields["stage_to_rank"],
            microbatches=fields["microbatches"],
        )


def row_text(row: tuple[Act, ...]) -> str:
    """`F0.0 B0.0 ...`, which `parse_row` reads back."""
    return " ".join(map(str, row))


def parse_row(text: str) -> tuple[Act, ...]:
    """Read `F0.0 B0.0 ...`.

    Raises:
        ScheduleError: with the first word that is no action.
    """
    words = text.split()
    return tuple(map(Act.parse, words))
