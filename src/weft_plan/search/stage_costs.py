"""Costs of the stages of layouts, from those of their blocks: seconds, saved bytes, activations in flight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.model_config import BlockSpec
from weft.layout.stages import split_by_cost
from weft.parallel.pp import AXIS as PP
from weft_plan.search.block_costs import BlockMeasurements, CostsByKind
from weft_plan.search.in_flight import (
    InFlight,
    StageBytes,
    in_flight_when_fullest,
    replayed_in_flight,
)
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_stages import LayoutStages
from weft_plan.search.pipeline_tables import SizedTable, most_held_bytes


@dataclass(frozen=True)
class StageWork:
    """Sums of the costs of the blocks of every stage."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    saved_bytes: Sequence[int]


class LayoutStageCosts:
    """Costs of the stages of the layouts of one model; each computed once."""

    def __init__(
        self,
        specs: Sequence[BlockSpec],
        kinds: Mapping[str, str],
        blocks: BlockMeasurements,
        stages: LayoutStages,
    ) -> None:
        self._specs = specs
        self._kinds = kinds
        self._blocks = blocks
        self._stages = stages
        self._in_flight: dict[object, list[InFlight]] = {}
        self._work: dict[object, StageWork] = {}
        self._kept_costs: list[CostsByKind] = []
        """Whose ids are keys: so no others have them."""

    def work(self, layout: Layout, costs: CostsByKind) -> StageWork:
        """Of every stage; `costs` are those of the layout's blocks, or bounds of them."""
        num_stages = layout.degree(PP) * layout.chunks
        key = num_stages, layout.split, id(costs)
        known = self._work.get(key)
        if known is None:
            self._kept_costs.append(costs)
            known = self._summed(layout, costs)
            self._work[key] = known
        return known

    def _summed(self, layout: Layout, costs: CostsByKind) -> StageWork:
        forward: list[float] = []
        backward: list[float] = []
        saved: list[int] = []
        for names in self._stages.names(layout):
            blocks = [costs[self._kinds[name]] for name in names]
            forward.append(sum(block.forward_s for block in blocks))
            backward.append(sum(block.backward_s for block in blocks))
            saved.append(sum(block.saved_bytes for block in blocks))
        return StageWork(forward, backward, saved)

    def seconds(self, layout: Layout) -> list[float]:
        """Of the blocks of every stage for one micro-batch."""
        work = self.work(layout, self._blocks.of(layout))
        seconds: list[float] = []
        for forward_s, backward_s in zip(work.forward_s, work.backward_s, strict=True):
            seconds.append(forward_s + backward_s)
        return seconds

    def split_by_seconds(self, layout: Layout) -> tuple[int, ...]:
        """Layers of every stage, so that the stage with the most measured seconds has the least."""
        costs = self._blocks.of(layout)
        timed: list[BlockSpec] = []
        for block in self._specs:
            own = costs[self._kinds[block.name]]
            nanoseconds = 1e9 * (own.forward_s + own.backward_s)
            timed.append(replace(block, flops=nanoseconds))
        num_stages = self._stages.num_stages(layout)
        names_of_stages = split_by_cost(timed, num_stages)
        return self._stages.num_layers(names_of_stages)

    def in_flight(self, layout: Layout, table: SizedTable, costs: CostsByKind) -> list[InFlight]:
        """Of every pipeline rank, under the table of the layout."""
        key = table, layout.split, id(costs)
        known = self._in_flight.get(key)
        if known is None:
            self._kept_costs.append(costs)
            known = list(self._activations(layout, table, costs))
            self._in_flight[key] = known
        return known

    def _activations(
        self, layout: Layout, table: SizedTable, costs: CostsByKind
    ) -> Iterator[InFlight]:
        is_recomputed = layout.recompute != "none"
        is_measured = costs is self._blocks.of(layout)
        if table.table.splits and is_recomputed and is_measured:
            stages = self._stage_bytes(layout, costs)
            for row in table.table.rows:
                yield replayed_in_flight(row, stages)
            return
        names_of_stages = self._stages.names(layout)
        sizes_of_stages = self._stages.sizes(layout)
        saved = self.work(layout, costs).saved_bytes
        most_held = table.most_held
        if 0 in self._stages.layers(layout):  # stages of very different sizes
            most_held = most_held_bytes(table.table, saved)
        for held in most_held:
            names = names_of_stages[held.last_stage]
            blocks = [costs[self._kinds[name]] for name in names]
            has_params = [bool(size) for size in sizes_of_stages[held.last_stage]]
            yield in_flight_when_fullest(held, blocks, saved=saved, has_params=has_params)

    def _stage_bytes(self, layout: Layout, costs: CostsByKind) -> dict[int, StageBytes]:
        """The bytes of every stage whose backwards are split."""
        deferred = self._blocks.deferred_bytes(layout)
        sizes_of_stages = self._stages.sizes(layout)
        found: dict[int, StageBytes] = {}
        for stage, names in enumerate(self._stages.names(layout)):
            kinds = [self._kinds[name] for name in names]
            found[stage] = StageBytes.of(
                [costs[kind] for kind in kinds],
                has_params=[bool(size) for size in sizes_of_stages[stage]],
                deferred=[deferred[kind] for kind in kinds],
            )
        return found
