"""Tables of the schedules of a search, shortened where that changes no bound, with their order and the activations in flight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.simulate.pipeline_time import PipelineOrder, pipeline_order
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import find
from weft.schedule.simulate import ACTIVATION_CHANGE

ROUNDS = 4
"""A table of this many micro-batches a pipeline rank stands for longer ones."""
KEEPS_ALL = "gpipe"
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


class PipelineTables:
    """Tables by schedule and sizes, each made once."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, int, int, int], Table] = {}
        self._orders: dict[int, PipelineOrder] = {}
        self._stages: dict[int, list[list[int]]] = {}
        self._held: dict[int, list[HeldActivations]] = {}

    def table(self, schedule: str, *, ranks: int, chunks: int, num_micro: int) -> Table:
        """The schedule's table, or a shorter one with as many activations in flight."""
        key = schedule, ranks, chunks, num_micro
        if key not in self._tables:
            self._tables[key] = self._shortened(schedule, ranks, chunks, num_micro)
        return self._tables[key]

    def _shortened(self, schedule: str, ranks: int, chunks: int, num_micro: int) -> Table:
        found = find(schedule)
        short = ROUNDS * ranks
        is_long = short < num_micro and schedule != KEEPS_ALL
        if is_long and not found.faults(ranks=ranks, chunks=chunks, microbatches=short):
            return self.table(schedule, ranks=ranks, chunks=chunks, num_micro=short)
        return found.table(ranks, chunks, num_micro)

    def order(self, table: Table) -> PipelineOrder:
        """The order of the actions of a table of these."""
        if id(table) not in self._orders:
            self._orders[id(table)] = pipeline_order(table)
        return self._orders[id(table)]

    def stages_of_ranks(self, table: Table) -> list[list[int]]:
        """Stages of every rank of a table of these, ascending."""
        if id(table) not in self._stages:
            stages: list[list[int]] = [[] for _ in range(table.num_ranks)]
            for stage, rank in enumerate(table.stage_to_rank):
                stages[rank].append(stage)
            self._stages[id(table)] = stages
        return self._stages[id(table)]

    def most_held(self, table: Table) -> list[HeldActivations]:
        """For each rank of a table of these the activations when it holds most of them."""
        if id(table) not in self._held:
            sizes = [1] * len(table.stage_to_rank)
            self._held[id(table)] = most_held_bytes(table, sizes)
        return self._held[id(table)]


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
