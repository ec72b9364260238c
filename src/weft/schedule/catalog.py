"""The catalogue of schedules: every module of this package that has `NAME` and `table`, and table files.

A schedule file declares `NAME`, `CHUNKS` (numbers of chunks that a rank may hold, the default first),
`table(ranks, chunks, microbatches) -> Table`, and, where not every size works, `check(ranks, chunks, microbatches) ->
Fault | None`. Its docstring holds its picture. No other file is edited: see docs/extend.md.
"""

from __future__ import annotations

import importlib
import itertools
import os
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType

from weft.errors import Fault, ScheduleError, counted, did_you_mean
from weft.schedule import one_f_one_b
from weft.schedule.actions import KEY, Table
from weft.schedule.table_file import TableLines, read_table, table_lines, table_of

MAX_ACTIONS = 2**18
"""Forwards and backwards of a table: planning takes about 20 us for each."""


DEFAULT_SCHEDULE = one_f_one_b.NAME
"""The schedule that takes every number of micro-batches."""
DEFAULT_RANKS = 4
DEFAULT_MICROBATCHES = 8
"""Sizes of a picture where none are asked for."""


@dataclass(frozen=True)
class Schedule:
    """An order of the actions of a pipeline step.

    Attributes:
        name: its value of the key `pipeline.schedule`.
        doc: its docstring: the first line says what it is, a picture follows.
        chunks: numbers of chunks (stages on one rank) that it accepts, the default first.
        table: `table(ranks, chunks, microbatches)`; sizes must have passed `faults`.
        check: `check(ranks, chunks, microbatches)`: why these positive sizes do not work, or None.
        file_table: the one table of a schedule file; None: `table` makes tables of many sizes.
    """

    name: str
    doc: str
    chunks: range
    table: Callable[[int, int, int], Table]
    check: Callable[[int, int, int], Fault | None]
    file_table: Table | None = None

    @property
    def default_chunks(self) -> int:
        """Chunks a rank holds by default."""
        return self.chunks[0]

    def faults(self, *, ranks: int, chunks: int, microbatches: int) -> tuple[Fault, ...]:
        """Why these sizes do not work; empty when `table` can be made."""
        found = list(self._range_faults(ranks, chunks, microbatches))
        # the check of a schedule may divide by these sizes
        if not found:
            fault = self.check(ranks, chunks, microbatches)
            if fault is not None:
                found.append(fault)
        return tuple(found)

    def sizes(
        self, *, ranks: int, chunks: int, microbatches: int
    ) -> Iterator[tuple[int, int, int]]:
        """Every (ranks, chunks, microbatches) up to these that it accepts, for tests and sweeps."""
        candidates = itertools.product(
            range(1, ranks + 1), range(1, chunks + 1), range(1, microbatches + 1)
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
            yield Fault(
                KEY,
                "too many actions a step",
                got=f"{ranks} ranks x {chunks} chunks x {microbatches} micro-batches",
                need=f"at most {MAX_ACTIONS} forwards and backwards",
                fix="fewer ranks, chunks or micro-batches",
            )
        if chunks not in self.chunks:
            fewest = self.chunks[0]
            most = self.chunks[-1]
            yield Fault(
                "pipeline.chunks",
                f"{self.name} does not work with {counted(chunks, 'chunk')} a rank",
                need=str(fewest) if fewest == most else f"{fewest} to {most}",
                fix=f"--pipeline.chunks {fewest}",
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


def find(name: str, lines: TableLines = ()) -> Schedule:
    """The schedule of this public name, or that of a table.

    Args:
        name: public name, or the path of a schedule file.
        lines: content of that file; it is not read again.

    Raises:
        ScheduleError: there is no such name or file, or it holds no valid table.
    """
    known = SCHEDULES.get(name)
    # a public name first: a file of that name in the working folder does not hide the schedule
    if known is not None:
        return known
    if lines:
        return _of_table(table_of(lines), name)
    if not os.path.exists(name):
        fault = Fault(KEY, f"no schedule or table file {name!r}", fix=did_you_mean(name, SCHEDULES))
        raise ScheduleError(fault)
    table = read_table(Path(name))
    return _of_table(table, name)


def lines_of(name: str) -> TableLines:
    """Content of the schedule file of this path; empty for a public name.

    Raises:
        ScheduleError: as `find`.
    """
    table = find(name).file_table
    return () if table is None else table_lines(table)


def _of_table(table: Table, path: str) -> Schedule:
    def check(ranks: int, chunks: int, microbatches: int) -> Fault | None:
        if (ranks, microbatches) == (table.num_ranks, table.microbatches):
            return None
        return Fault(
            KEY,
            f"the table in {path} has other sizes",
            got=_sizes_text(ranks, microbatches),
            need=_sizes_text(table.num_ranks, table.microbatches),
        )

    num_chunks = table.num_stages // table.num_ranks
    return Schedule(
        name=short_name(path),
        doc=f"The table in {path}.",
        chunks=range(num_chunks, num_chunks + 1),
        table=lambda *_sizes: table,
        check=check,
        file_table=table,
    )


def short_name(name: str) -> str:
    """A public name as it is; of a path its last part."""
    return name if name in SCHEDULES else Path(name).name


def make_table(
    name: str,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
) -> Table:
    """The table of schedule `name` (or of a file) for these sizes.

    Args:
        ranks, microbatches: default: those of the file, or 4 and 8.

    Raises:
        ScheduleError: for an unknown name, or with every fault of the sizes.
    """
    schedule = find(name)
    file_table = schedule.file_table
    if ranks is None:
        ranks = DEFAULT_RANKS if file_table is None else file_table.num_ranks
    if microbatches is None:
        microbatches = DEFAULT_MICROBATCHES if file_table is None else file_table.microbatches
    if chunks is None:
        chunks = schedule.default_chunks
    faults = schedule.faults(ranks=ranks, chunks=chunks, microbatches=microbatches)
    if faults:
        raise ScheduleError(*faults)
    return schedule.table(ranks, chunks, microbatches)


def _sizes_text(ranks: int, microbatches: int) -> str:
    micro_batches = counted(microbatches, "micro-batch", "micro-batches")
    return f"{counted(ranks, 'rank')} and {micro_batches}"
