"""Owns pipeline schedules as data: `Act`, `Table`, and `needs`, the only statement of who waits for whom."""

from __future__ import annotations

import json
import re
from collections import Counter, deque
from collections.abc import Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, cast

from weft.errors import Fault, ScheduleError

Kind = Literal["F", "B", "I", "W"]
KIND_MEANING: dict[Kind, str] = {
    "F": "forward",
    "B": "backward, whole",
    "I": "backward, the gradient of the input",
    "W": "backward, the gradient of the weights",
}
KEY = "pipeline.schedule"


class Act(NamedTuple):
    """One piece of computation: `F0.3` is the forward of micro-batch 3 through stage 0."""

    kind: Kind
    stage: int
    mb: int

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.mb}"

    @staticmethod
    def parse(text: str) -> Act:
        """Read `F0.3`.

        Raises:
            ScheduleError: when `text` is no action.
        """
        match = re.fullmatch(r"([FBIW])(\d+)\.(\d+)", text)
        if match is None:
            need = "like F0.3: F, B, I or W, then stage.micro-batch"
            raise ScheduleError(Fault(KEY, f"cannot read the action {text!r}", need=need))
        return Act(cast(Kind, match[1]), int(match[2]), int(match[3]))


def needs(act: Act, *, num_stages: int, splits: Container[tuple[int, int]] = ()) -> tuple[Act, ...]:
    """Actions whose results `act` uses: it can start when all of them are done.

    A backward comes whole (B) or split (I, then W). `splits` holds the (stage, micro-batch) pairs whose backward is
    split; a table may mix both.
    """
    kind, stage, mb = act
    if kind == "F":
        return (Act("F", stage - 1, mb),) if stage else ()
    if kind == "W":
        return (Act("I", stage, mb),)
    own_forward = Act("F", stage, mb)
    if stage + 1 == num_stages:
        return (own_forward,)
    return own_forward, Act("I" if (stage + 1, mb) in splits else "B", stage + 1, mb)


@dataclass(frozen=True)
class Table:
    """What each pipeline rank computes, in order.

    Attributes:
        rows: one row of actions for each pp coordinate.
        home: `home[stage]` is the pp coordinate that owns the stage.
        microbatches: every stage runs micro-batches 0 to `microbatches` - 1.
    """

    rows: tuple[tuple[Act, ...], ...]
    home: tuple[int, ...]
    microbatches: int

    @property
    def num_ranks(self) -> int:
        """Number of pp coordinates."""
        return len(self.rows)

    @property
    def num_stages(self) -> int:
        """Number of stages, over all ranks."""
        return len(self.home)

    @cached_property
    def splits(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) pairs whose backward is split into I and W."""
        return frozenset((act.stage, act.mb) for row in self.rows for act in row if act.kind in ("I", "W"))

    def stages(self, rank: int) -> tuple[int, ...]:
        """Stages that `rank` owns, ascending."""
        return tuple(stage for stage, home in enumerate(self.home) if home == rank)

    def needs(self, act: Act) -> tuple[Act, ...]:
        """`needs` as it stands in this table."""
        return needs(act, num_stages=self.num_stages, splits=self.splits)

    def source(self, act: Act) -> Act | None:
        """The action of a neighbouring stage whose tensor `act` takes in, if there is one."""
        return next((need for need in self.needs(act) if need.stage != act.stage), None)

    @property
    def text(self) -> str:
        """The text that `parse` reads back."""
        rows = (f"rank {rank}: {' '.join(map(str, row))}" for rank, row in enumerate(self.rows))
        return "\n".join((f"microbatches {self.microbatches}", f"home {' '.join(map(str, self.home))}", *rows)) + "\n"

    @staticmethod
    def parse(text: str) -> Table:
        """Read the text form: `microbatches 2`, `home 0 1`, then `rank 0: F0.0 B0.0 ...` for each rank; `#` comments.

        Raises:
            ScheduleError: naming the first line that cannot be read.
        """
        head: dict[str, tuple[int, ...]] = {}
        rows: list[tuple[Act, ...]] = []
        for number, line in enumerate(text.splitlines(), start=1):
            words = line.partition("#")[0].strip()
            if match := re.fullmatch(r"(microbatches|home)((?:\s+\d+)+)", words):
                head[match[1]] = tuple(map(int, match[2].split()))
            elif (match := re.fullmatch(r"rank\s+(\d+)\s*:(.*)", words)) and int(match[1]) == len(rows):
                rows.append(tuple(map(Act.parse, match[2].split())))
            elif words:
                need = f"'microbatches N', 'home 0 1 ...' or 'rank {len(rows)}: F0.0 ...'"
                raise ScheduleError(Fault(KEY, f"cannot read line {number} of the table", got=repr(line), need=need))
        if len(head.get("microbatches", ())) != 1 or "home" not in head:
            need = "lines 'microbatches N' and 'home 0 1 ...'"
            raise ScheduleError(Fault(KEY, "the table lacks its head", need=need))
        return Table(tuple(rows), head["home"], head["microbatches"][0])

    def to_json(self) -> str:
        """The JSON that `from_json` reads back; rows are written as text."""
        rows = [" ".join(map(str, row)) for row in self.rows]
        return json.dumps({"microbatches": self.microbatches, "home": self.home, "rows": rows})

    @staticmethod
    def from_json(text: str) -> Table:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        rows = tuple(tuple(map(Act.parse, row.split())) for row in data["rows"])
        return Table(rows, tuple(data["home"]), data["microbatches"])


def linearise(table: Table) -> tuple[Act, ...]:
    """All actions in one order that keeps each row and puts each action after what it needs.

    Raises:
        ScheduleError: when there is no such order, naming the actions that wait and what each waits for.
    """
    done: dict[Act, None] = {}
    reached = [0] * table.num_ranks
    waiting: dict[Act, list[int]] = {}
    runnable = deque(range(table.num_ranks))
    while runnable:
        rank = runnable.popleft()
        while reached[rank] < len(table.rows[rank]):
            act = table.rows[rank][reached[rank]]
            missing = next((need for need in table.needs(act) if need not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done[act] = None
            reached[rank] += 1
            runnable.extend(waiting.pop(act, ()))
    if waiting:
        raise ScheduleError(_deadlock(table, waiting, reached))
    return tuple(done)


def validate(table: Table) -> None:
    """Check that every action is there once, on the rank that owns its stage, and that nobody waits for ever.

    Raises:
        ScheduleError: with every fault; each names the actions.
    """
    faults = tuple(_shape_faults(table)) or tuple(_action_faults(table))
    if faults:
        raise ScheduleError(*faults)
    linearise(table)


def _shape_faults(table: Table) -> Iterable[Fault]:
    if not table.rows:
        yield Fault(KEY, "the table has no ranks", need="at least 1")
    if table.microbatches < 1:
        yield Fault(KEY, f"the table has {table.microbatches} micro-batches", need="at least 1")
    if outside := [stage for stage, rank in enumerate(table.home) if not 0 <= rank < table.num_ranks]:
        need = f"ranks 0 to {table.num_ranks - 1}"
        yield Fault(KEY, f"stages {_some(outside)} live on no rank", got=f"home {table.home}", need=need)
    if idle := [rank for rank in range(table.num_ranks) if rank not in table.home]:
        yield Fault(KEY, f"ranks {_some(idle)} own no stage", got=f"home {table.home}", fix="use fewer pp ranks")


def _action_faults(table: Table) -> Iterable[Fault]:
    counts = Counter(act for row in table.rows for act in row)
    wanted = [
        Act(kind, stage, mb)
        for stage in range(table.num_stages)
        for mb in range(table.microbatches)
        for kind in (("F", "I", "W") if (stage, mb) in table.splits else ("F", "B"))
    ]
    if missing := [act for act in wanted if act not in counts]:
        yield Fault(KEY, f"the table lacks {_some(missing)}")
    if surplus := sorted(counts.keys() - set(wanted)):
        size = f"{table.num_stages} stages, {table.microbatches} micro-batches, each backward either B or I and W"
        yield Fault(KEY, f"the table must not hold {_some(surplus)}", need=size)
    if doubled := [act for act, count in counts.items() if count > 1]:
        yield Fault(KEY, f"the table runs more than once: {_some(doubled)}")
    for rank, row in enumerate(table.rows):
        own = table.stages(rank)
        if strangers := [act for act in row if act.stage not in own]:
            yield Fault(KEY, f"rank {rank} holds {_some(strangers)}", need=f"only its stages {_some(own)}")


def _deadlock(table: Table, waiting: dict[Act, list[int]], reached: Sequence[int]) -> Fault:
    """Say where each rank stands, what it waits for, and where the rank stands that should bring it."""
    coming = {act: rank for rank, row in enumerate(table.rows) for act in row[reached[rank] :]}

    def stands(rank: int) -> str:
        return f"rank {rank} stands at {table.rows[rank][reached[rank]]}"

    def waits(rank: int, need: Act) -> str:
        return f"{stands(rank)} and waits for {need} ({stands(coming[need]) if need in coming else 'no rank runs it'})"

    stuck = sorted((rank, need) for need, ranks in waiting.items() for rank in ranks)
    got = "; ".join(waits(*pair) for pair in stuck[:8])
    return Fault(KEY, "the table deadlocks", got=got, fix="reorder these rows")


def _some(items: Collection[object], most: int = 6) -> str:
    shown = ", ".join(map(str, list(items)[:most]))
    return shown + (f" and {len(items) - most} more" if len(items) > most else "")
