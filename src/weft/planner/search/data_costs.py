"""Seconds that data ranks add to the stages of a layout: collectives and kernels of its ZeRO stage, the reduction, the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.planner.search.layout_choice import Layout
from weft.planner.search.layout_stages import BlockParams
from weft.planner.search.zero_costs import ZERO_THAT_GATHERS, Part, ZeroCosts, ZeroMeasurements
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.table_time import StageCollectives


@dataclass(frozen=True)
class DataSeconds:
    """Collectives of a stage over the data ranks, and kernels of the ZeRO stage, for an action.

    Attributes:
        sent: of the collectives, without what a backward leaves under way.
        exposed: of these, before the first kernel.
        kernels: in addition to those of the blocks.
    """

    sent: float = 0.0
    exposed: float = 0.0
    kernels: float = 0.0


class DataCosts:
    """Costs over the data ranks of the layouts of a run on one device."""

    def __init__(self, zeros: ZeroMeasurements, speeds: Speeds) -> None:
        self._zeros = zeros
        self._speeds = speeds
        self._sent: dict[object, float] = {}

    def zero(self, layout: Layout) -> ZeroCosts:
        """Costs of the ZeRO stage of a layout."""
        return self._zeros.of(layout.zero, num_data=layout.num_data)

    def seconds_beside(
        self,
        layout: Layout,
        part: Part,
        work: Sequence[float],
        params: Sequence[BlockParams],
    ) -> list[float]:
        """Seconds of an action of every stage, from those of its blocks, and its parameters."""
        slowdown = self._speeds.efficiency.overlap_slowdown
        known: dict[BlockParams, DataSeconds] = {}
        found: list[float] = []
        for work_s, own in zip(work, params, strict=True):
            if own not in known:
                known[own] = self._of_action(layout, part, own)
            data = known[own]
            hidden_s = data.sent - data.exposed
            busy_s = work_s + data.kernels + slowdown * hidden_s
            found.append(data.exposed + max(busy_s, hidden_s))
        return found

    def _of_action(self, layout: Layout, part: Part, params: BlockParams) -> DataSeconds:
        zero = self.zero(layout)
        kernels_s = zero.kernels[part].of(params.total, layout.num_data)
        sent_s = self.sent_s(layout, part, params)
        if layout.zero < ZERO_THAT_GATHERS or not params.num_blocks:
            return DataSeconds(sent_s, 0.0, kernels_s)
        collectives = self._collectives(layout, params)
        if part == "forward":
            return DataSeconds(sent_s, collectives.forward_gather, kernels_s)
        own_s = sent_s - collectives.left
        return DataSeconds(own_s, collectives.backward_gather, kernels_s)

    def collectives_of_stages(
        self, layout: Layout, params: Sequence[BlockParams]
    ) -> list[StageCollectives]:
        """What goes on behind the actions of every stage; [] where nothing does."""
        if layout.zero < ZERO_THAT_GATHERS or layout.num_data == 1:
            return []
        known: dict[BlockParams, StageCollectives] = {}
        for own in params:
            if own not in known:
                known[own] = self._collectives(layout, own)
        return [known[own] for own in params]

    def _collectives(self, layout: Layout, params: BlockParams) -> StageCollectives:
        """Of one stage under ZeRO 3. A forward waits for its first block, and a backward leaves the
        reduction of that one under way. An embedding computes too little to hide those of the block
        beside it, so they take as long as those of a mean block, at least.
        """
        if not params.num_blocks:
            return StageCollectives(0.0, 0.0, 0.0)
        gathered_s = self.sent_s(layout, "forward", params)
        reduced_s = self.sent_s(layout, "backward", params) - gathered_s
        mean_share = 1 / params.num_blocks
        begin_share = max(params.first / params.total, mean_share)
        last_share = params.last / params.total
        return StageCollectives(
            forward_gather=begin_share * gathered_s,
            backward_gather=last_share * gathered_s,
            left=begin_share * reduced_s,
        )

    def sent_s(self, layout: Layout, part: Part, params: BlockParams) -> float:
        """Seconds of the collectives over the data ranks for the parameters of some blocks."""
        key = part, layout.zero, layout.degrees, params.total, params.num_blocks
        if key not in self._sent:
            self._sent[key] = self.zero(layout).sent_s(
                part,
                self._speeds,
                layout.data_group,
                params=params.total,
                num_blocks=params.num_blocks,
            )
        return self._sent[key]

    def after_s(self, layout: Layout, by_rank: Sequence[BlockParams]) -> float:
        """Of the last reduction and the optimizer of the rank with the most parameters."""
        most = max(by_rank)
        kernels = self.zero(layout).kernels["update"]
        reduced_s = self.sent_s(layout, "last backward", most)
        if layout.zero == ZERO_THAT_GATHERS:
            reduced_s -= self.sent_s(layout, "forward", most)
        last_share = 0.0
        if most.total:
            largest_first = max(params.first for params in by_rank)
            last_share = largest_first / most.total
        update_s = kernels.of(most.total, layout.num_data)
        update_s += self.sent_s(layout, "update", most)
        return update_s + last_share * reduced_s
