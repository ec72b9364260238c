"""Tables of the schedules of a search, shortened where that changes no bound, with their order and the activations in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from weft.parallel.pipeline.forward import forward_table
from weft.planner.simulate.pipeline_time import PipelineOrder, pipeline_order
from weft.schedule import gpipe
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import find
from weft.schedule.simulate import ACTIVATION_CHANGE

ROUNDS = 4
"""A table of this many micro-batches a pipeline rank stands for longer ones."""
KEEPS_ALL = gpipe.NAME
"""The schedule whose activations in flight grow with every micro-batch."""


@dataclass(frozen=True)
class HeldActivations:
    """The activations of a rank when it holds most of them.

    Attributes:
        counts: by stage.
        last_stage: of the forward that made the last one.
    """

    counts: Counter[int]
    last_stage: int


class SizedTable:
    """A table of a schedule for some sizes, with what follows from it; each is computed once."""

    def __init__(self, table: Table) -> None:
        self.table = table

    @property
    def num_actions(self) -> int:
        """The number of actions of all ranks."""
        return sum(len(row) for row in self.table.rows)

    @cached_property
    def order(self) -> PipelineOrder:
        """The order of its actions."""
        return pipeline_order(self.table)

    @cached_property
    def forwards(self) -> PipelineOrder:
        """The order of its forwards alone."""
        return pipeline_order(forward_table(self.table), whole=self.table)

    @cached_property
    def stages_of_ranks(self) -> list[list[int]]:
        """Stages of every rank, ascending."""
        stages: list[list[int]] = [[] for _ in range(self.table.num_ranks)]
        for stage, rank in enumerate(self.table.stage_to_rank):
            stages[rank].append(stage)
        return stages

    @cached_property
    def most_held(self) -> list[HeldActivations]:
        """For each rank the activations when it holds most of them."""
        num_stages = len(self.table.stage_to_rank)
        return most_held_bytes(self.table, [1] * num_stages)


class PipelineTables:
    """Tables by schedule and sizes, each made once."""

    def __init__(self) -> None:
        self._tables: dict[object, SizedTable] = {}

    def table(self, schedule: str, *, ranks: int, chunks: int, num_micro: int) -> SizedTable:
        """The schedule's table, or a shorter one with as many activations in flight."""
        key = schedule, ranks, chunks, num_micro
        known = self._tables.get(key)
        if known is None:
            known = self._made(schedule, ranks, chunks, num_micro)
            self._tables[key] = known
        return known

    def _made(self, schedule: str, ranks: int, chunks: int, num_micro: int) -> SizedTable:
        found = find(schedule)
        short = ROUNDS * ranks
        if short < num_micro and schedule != KEEPS_ALL:
            faults = found.faults(ranks=ranks, chunks=chunks, microbatches=short)
            if not faults:
                return self.table(schedule, ranks=ranks, chunks=chunks, num_micro=short)
        return SizedTable(found.table(ranks, chunks, num_micro))


def most_held_bytes(table: Table, sizes: Sequence[int]) -> list[HeldActivations]:
    """For each rank the activations when it holds most bytes of them; `sizes` are those of an
    activation of every stage.
    """
    return [_most_held_by(row, sizes) for row in table.rows]


def _most_held_by(row: Sequence[Act], sizes: Sequence[int]) -> HeldActivations:
    """The activations when a row of actions holds most bytes of them."""
    held: Counter[int] = Counter()
    most = HeldActivations(Counter(), row[0].stage)
    held_bytes = 0
    most_bytes = 0
    for act in row:
        change = ACTIVATION_CHANGE[act.kind]
        held[act.stage] += change
        held_bytes += change * sizes[act.stage]
        if held_bytes > most_bytes:
            most_bytes = held_bytes
            most = HeldActivations(held.copy(), act.stage)
    return most
