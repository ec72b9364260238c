"""Figures of several schedules on one scale: makespan, bubble, activations held, messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import cast

from weft.errors import Fault, ScheduleError
from weft.schedule.actions import Table
from weft.schedule.catalog import (
    DEFAULT_MICROBATCHES,
    DEFAULT_RANKS,
    SCHEDULES,
    Schedule,
    find,
    short_name,
)
from weft.schedule.costs import ScheduleCosts
from weft.schedule.simulate import Cost, peak_microbatches, simulate
from weft.schedule.timeline import Timeline, bubble, makespan


@dataclass(frozen=True)
class ScheduleFigures:
    """A table at costs that give every device the same work, whatever its number of chunks.

    Attributes:
        name: public name, or the path of a schedule file.
    """

    name: str
    table: Table
    costs: ScheduleCosts

    @property
    def label(self) -> str:
        """Name for readers."""
        return short_name(self.name)

    @property
    def chunks(self) -> int:
        """Stages of each rank."""
        return self.table.num_stages // self.table.num_ranks

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step; exact."""
        table = self.table
        times = self.costs.of_stages(num_stages=table.num_stages, chunks=self.chunks)
        # fractions behave as floats here, and stay exact
        cost = cast(Cost, times.cost)
        hop = cast(float, times.message)
        return simulate(table, cost, hop=hop)

    @cached_property
    def makespan(self) -> Fraction:
        """Length of the step in units of the costs."""
        return Fraction(makespan(self.timeline))

    @cached_property
    def bubble(self) -> Fraction:
        """Idle share of all rank-time."""
        return Fraction(bubble(self.timeline))

    @cached_property
    def held(self) -> tuple[Fraction, ...]:
        """For each rank the most activations it holds, in those of its whole share of the model for
        one micro-batch.
        """
        return peak_microbatches(self.table)

    @cached_property
    def num_messages(self) -> int:
        """Tensors sent between ranks in a step."""
        table = self.table
        found = 0
        for act in table.actions:
            source = table.source(act)
            if source is None:
                continue
            if table.rank_of(source) != table.rank_of(act):
                found += 1
        return found


def compare(
    names: Iterable[str],
    costs: ScheduleCosts,
    *,
    ranks: int | None = None,
    microbatches: int | None = None,
    chunks: int | None = None,
) -> tuple[ScheduleFigures, ...]:
    """The figures of these schedules, public names or files.

    Args:
        ranks, microbatches: default: those of the first schedule file, or 4 and 8.
        chunks: for the schedules that accept this number; the others have their default.

    Raises:
        ScheduleError: a schedule does not accept the sizes, or none accepts `chunks`.
    """
    schedules = {name: find(name) for name in names}
    files = [found.file_table for found in schedules.values() if found.file_table is not None]
    default_ranks = files[0].num_ranks if files else DEFAULT_RANKS
    default_microbatches = files[0].microbatches if files else DEFAULT_MICROBATCHES
    p = default_ranks if ranks is None else ranks
    m = default_microbatches if microbatches is None else microbatches
    if chunks is not None and not any(chunks in found.chunks for found in schedules.values()):
        what = f"no schedule of the comparison works with {chunks} a rank"
        raise ScheduleError(Fault("chunks", what, fix="leave out --chunks"))
    figures: list[ScheduleFigures] = []
    faults: list[Fault] = []
    for name, schedule in schedules.items():
        number = chunks_for(schedule, chunks)
        faults.extend(schedule.faults(ranks=p, chunks=number, microbatches=m))
        if not faults:
            table = schedule.table(p, number, m)
            figures.append(ScheduleFigures(name, table, costs))
    if faults:
        raise ScheduleError(*dict.fromkeys(faults))
    return tuple(figures)


def chunks_for(schedule: Schedule, chunks: int | None) -> int:
    """The number of chunks that is asked for, where a schedule accepts it; else its default."""
    if chunks is not None and chunks in schedule.chunks:
        return chunks
    return schedule.default_chunks


def accepting(*, ranks: int, microbatches: int) -> Iterator[str]:
    """Names of the built-in schedules that accept these sizes with their default chunks."""
    for name, schedule in SCHEDULES.items():
        chunks = schedule.default_chunks
        if not schedule.faults(ranks=ranks, chunks=chunks, microbatches=microbatches):
            yield name
