"""The catalogue of schedules: every module of this package that has `NAME` and `table`, and table files.

A schedule file declares `NAME`, `CHUNKS` (numbers of chunks that a rank may hold, the default first),
`table(ranks, chunks, microbatches) -> Table`, and, where not every size works, `check(ranks, chunks, microbatches) ->
Fault | None`. Its docstring holds its picture. No other file is edited: see docs/extend.md.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import pkgutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

from weft.errors import Fault, ScheduleError, counted, did_you_mean
from weft.schedule.actions import KEY, Table
from weft.schedule.validate_table import validate
from weft.small_files import MIB, UnreadableFile, parse_json, read_text

MAX_ACTIONS = 2**18
"""Forwards and backwards of a table: planning takes about 20 us for each."""
MAX_TABLE_BYTES = 4 * MIB
"""Size of the largest file of a table."""


@dataclass(frozen=True)
class Schedule:
    """An order of the actions of a pipeline step.

    Attributes:
        name: its value of the key `pipeline.schedule`.
        doc: its docstring: the first line says what it is, a picture follows.
        chunks: numbers of chunks (stages on one rank) that it accepts, the default first.
        table: `table(ranks, chunks, microbatches)`; sizes must have passed `faults`.
        check: `check(ranks, chunks, microbatches)`: why these positive sizes do not work, or None.
    """

    name: str
    doc: str
    chunks: range
    table: Callable[[int, int, int], Table]
    check: Callable[[int, int, int], Fault | None]

    @property
    def default_chunks(self) -> int:
        """Chunks a rank holds by default."""
        return self.chunks[0]

    def faults(self, *, ranks: int, chunks: int, microbatches: int) -> tuple[Fault, ...]:
        """Why these sizes do not work; empty when `table` can be made."""
        found = list(self._range_faults(ranks, chunks, microbatches))
        if not found:
            fault = self.check(ranks, chunks, microbatches)
            if fault is not None:
                found.append(fault)
        return tuple(found)

    def sizes(
        self,
        *,
        ranks: int,
        chunks: int,
        microbatches: int,
    ) -> Iterator[tuple[int, int, int]]:
        """Every (ranks, chunks, microbatches) up to these that it accepts, for tests and sweeps."""
        candidates = itertools.product(
            range(1, ranks + 1),
            range(1, chunks + 1),
            range(1, microbatches + 1),
        )
        for p, v, m in candidates:
            if not self.faults(ranks=p, chunks=v, microbatches=m):
                yield p, v, m

    def _range_faults(self, ranks: int, chunks: int, microbatches: int) -> Iterator[Fault]:
        if ranks < 1:
            yield Fault("mesh", f"a pipeline of {counted(ranks, 'rank')}", need="pp at least 1")
        if microbatches < 1:
            micro_batches = counted(microbatches, "micro-batch", "micro-batches")
            yield Fault("batch", f"a pipeline step of {micro_batches}", need="at least 1")
        num_actions = 2 * ranks * chunks * microbatches
        if num_actions > MAX_ACTIONS:
            got = f"{ranks} ranks x {chunks} chunks x {microbatches} micro-batches"
            need = f"at most {MAX_ACTIONS} forwards and backwards"
            yield Fault(KEY, "too many actions a step", got, need)
        if chunks not in self.chunks:
            low = self.chunks[0]
            high = self.chunks[-1]
            yield Fault(
                "pipeline.chunks",
                f"{self.name} does not work with {counted(chunks, 'chunk')} a rank",
                need=str(low) if low == high else f"{low} to {high}",
                fix=f"--pipeline.chunks {low}",
            )


def _accept_any_size(ranks: int, chunks: int, microbatches: int) -> None:
    return None


def _from_module(module: ModuleType) -> Schedule:
    return Schedule(
        name=module.NAME,
        doc=module.__doc__ or "",
        chunks=module.CHUNKS,
        table=module.table,
        check=getattr(module, "check", _accept_any_size),
    )


def _discover() -> Iterator[Schedule]:
    package, _, this_module = __name__.rpartition(".")
    folder = str(Path(__file__).parent)
    for file in pkgutil.iter_modules([folder]):
        if file.name == this_module:
            continue
        module = importlib.import_module(f"{package}.{file.name}")
        if hasattr(module, "NAME") and hasattr(module, "table"):
            yield _from_module(module)


SCHEDULES: Mapping[str, Schedule] = MappingProxyType(
    {schedule.name: schedule for schedule in _discover()}
)
"""Every schedule by its public name."""


def find(name: str) -> Schedule:
    """The schedule of this public name, or the table in the file of this path.

    Raises:
        ScheduleError: when there is neither, or the file holds no valid table.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    if not os.path.exists(name):
        raise ScheduleError(
            Fault(KEY, f"no schedule or table file {name!r}", fix=did_you_mean(name, SCHEDULES))
        )
    return _from_file(Path(name))


def _read_table(path: Path) -> Table:
    """The table of a text file, or of a JSON file of `weft schedule --json`."""
    try:
        text = read_text(path, max_bytes=MAX_TABLE_BYTES)
    except UnreadableFile as error:
        raise ScheduleError(error.fault(KEY)) from None
    if not text.lstrip().startswith("{"):
        return Table.parse(text)
    try:
        fields = parse_json(text)
        return Table.from_json(json.dumps(fields.get("table", fields)))
    except (ValueError, KeyError, TypeError, AttributeError):
        need = "a file of weft schedule --json, or a table as text"
        raise ScheduleError(Fault(KEY, f"the JSON in {path} is not a table", need=need)) from None


def _from_file(path: Path) -> Schedule:
    table = _read_table(path)
    num_actions = sum(map(len, table.rows))
    if table.microbatches > num_actions or table.num_stages > num_actions:
        got = (
            f"{table.microbatches} micro-batches, {table.num_stages} stages, {num_actions} actions"
        )
        raise ScheduleError(Fault(KEY, f"the table in {path} lacks actions", got=got))
    validate(table)

    def check(ranks: int, chunks: int, microbatches: int) -> Fault | None:
        if (ranks, microbatches) == (table.num_ranks, table.microbatches):
            return None
        return Fault(
            KEY,
            f"the table in {path} has other sizes",
            got=_sizes_text(ranks, microbatches),
            need=_sizes_text(table.num_ranks, table.microbatches),
        )

    num_chunks = max(Counter(table.stage_to_rank).values())
    return Schedule(
        name=path.name,
        doc=f"The table in {path}.",
        chunks=range(num_chunks, num_chunks + 1),
        table=lambda *_sizes: table,
        check=check,
    )


def make_table(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
) -> Table:
    """The table of schedule `name` (or of a file) for these sizes.

    Raises:
        ScheduleError: for an unknown name, or with every fault of the sizes.
    """
    schedule = find(name)
    if chunks is None:
        chunks = schedule.default_chunks
    faults = schedule.faults(
        ranks=ranks,
        chunks=chunks,
        microbatches=microbatches,
    )
    if faults:
        raise ScheduleError(*faults)
    return schedule.table(ranks, chunks, microbatches)


def _sizes_text(ranks: int, microbatches: int) -> str:
    micro_batches = counted(microbatches, "micro-batch", "micro-batches")
    return f"{counted(ranks, 'rank')} and {micro_batches}"
