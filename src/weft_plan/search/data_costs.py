"""Costs that data ranks add to the stages of a layout: states, collectives and kernels of its ZeRO stage, the update.

Note [Gradients of experts]
    Ranks along ep have the dense parameters in common, and not the experts: gradients, states and
    gathered values of these are shared by the ranks along the other data axes alone. That group has
    ep times fewer ranks, each ep times the states of a parameter, and fewer members in a node, so a
    ring has less of the node's network. Its collectives are others than those of dense parameters.

Note [Seconds of a backward]
    The first reduction begins when the backward of a block has ended. ZeRO 2 and 3 wait for the
    older of two reductions before another begins, so at the end of the backward those of its last
    two blocks (the first two of the stage) are under way at most, or the two of a block with
    experts; below them all that is not done.

Note [Copies of shards]
    Where states are copies along the data axis, the sum over copies of a block begins when its
    reduction over the shards has ended, beside the reduction of the next block. On two links both
    go on at once, and the slower one counts; on one link, and for the last block, one after the
    other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.zero_stages import ZERO_THAT_GATHERS, ZERO_THAT_REDUCES_EACH
from weft.planner.simulate.speeds import Link, Speeds
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_stages import BlockParams
from weft_plan.search.zero_costs import ParamCost, Part, ZeroCosts, ZeroMeasurements
from weft_plan.simulation.table_time import NO_REDUCTIONS, Reductions, StageCollectives


@dataclass(frozen=True)
class BackwardSeconds:
    """Seconds of a backward beside its collectives over the data ranks.

    Attributes:
        seconds: of its kernels, and of the all-gather before the first one.
        reductions: under way beside them and behind it.
    """

    seconds: float
    reductions: Reductions


class SentSeconds(NamedTuple):
    """Of collectives for dense parameters and for experts; see Note [Gradients of experts]. And of
    sums over copies; see Note [Copies of shards].
    """

    dense: float
    experts: float
    copies: float = 0.0

    @property
    def one_after_the_other(self) -> float:
        """All of them."""
        return self.dense + self.experts + self.copies


class DataCosts:
    """Costs over the data ranks of the layouts of a run on one device."""

    def __init__(self, zeros: ZeroMeasurements, speeds: Speeds) -> None:
        self._zeros = zeros
        self._speeds = speeds
        self._sent: dict[object, SentSeconds] = {}

    def zero(self, layout: Layout) -> ZeroCosts:
        """Costs of the ZeRO stage of a layout."""
        return self._zeros.of(layout.zero, num_data=layout.num_data)

    def state_bytes(self, layout: Layout, params: BlockParams) -> float:
        """Bytes of the states of a rank; see Note [Gradients of experts]."""
        return _held(self.zero(layout).states, layout, params)

    def forward_s(self, layout: Layout, work_s: float, params: BlockParams) -> float:
        """Seconds of a forward of a stage, from those of its blocks, and its parameters."""
        sent_s = self.sent_s(layout, "forward", params)
        exposed_s = self._first_gather_s(layout, params)
        kernels_s = _held(self.zero(layout).kernels["forward"], layout, params)
        hidden_s = sent_s - exposed_s
        return exposed_s + max(self._busy_s(work_s + kernels_s, hidden_s), hidden_s)

    def backward_s(
        self, layout: Layout, part: Part, work_s: float, params: BlockParams
    ) -> BackwardSeconds:
        """Seconds of a backward of a stage, from those of its blocks, and its parameters; see Note
        [Seconds of a backward].
        """
        kernels_s = _held(self.zero(layout).kernels[part], layout, params)
        reduced_s = self._reduced_s(layout, part, params)
        gathered_s = self._gathered_s(layout, params)
        exposed_s = self._gathered_s(layout, BlockParams.of([params.last]))
        of_first_s = self._reduced_of_block_s(layout, part, BlockParams.of([params.first]))
        of_second_s = self._reduced_of_block_s(layout, part, BlockParams.of([params.second]))
        least_left_s = max(of_first_s, of_second_s)  # an embedding computes too little to hide any
        most_left_s = reduced_s
        if layout.zero >= ZERO_THAT_REDUCES_EACH:
            most_left_s = of_first_s
            if not params.first.experts:
                most_left_s += of_second_s
        hidden_s = gathered_s - exposed_s + reduced_s
        sent_s = self._sent_of(layout, part, params).one_after_the_other - exposed_s
        busy_s = self._busy_s(work_s + kernels_s, sent_s - least_left_s)
        if not reduced_s:
            return BackwardSeconds(exposed_s + max(busy_s, hidden_s), NO_REDUCTIONS)
        reductions = Reductions(
            before=work_s * params.largest / params.total,
            seconds=hidden_s,
            least_left=least_left_s,
            most_left=most_left_s,
        )
        return BackwardSeconds(exposed_s + busy_s, reductions)

    def _busy_s(self, work_s: float, hidden_s: float) -> float:
        """Seconds that kernels take beside collectives."""
        return work_s + self._speeds.efficiency.overlap_slowdown * max(0.0, hidden_s)

    def collectives(
        self, layout: Layout, params: BlockParams, every: BackwardSeconds, last: BackwardSeconds
    ) -> StageCollectives:
        """What actions of a stage wait for first, and leave under way.

        Args:
            every, last: backwards of the stage.
        """
        return StageCollectives(
            forward_gather=self._first_gather_s(layout, params),
            backward_gather=self._gathered_s(layout, BlockParams.of([params.last])),
            reductions=every.reductions,
            last_reductions=last.reductions,
        )

    def _first_gather_s(self, layout: Layout, params: BlockParams) -> float:
        """Of the all-gathers that a forward waits for before it can hide others."""
        of_first_s = self._gathered_s(layout, BlockParams.of([params.first]))
        of_second_s = self._gathered_s(layout, BlockParams.of([params.second]))
        return max(of_first_s, of_second_s)  # an embedding computes too little to hide any

    def _gathered_s(self, layout: Layout, params: BlockParams) -> float:
        """Seconds of the all-gathers of a forward or backward."""
        if layout.zero < ZERO_THAT_GATHERS:
            return 0.0
        return self.sent_s(layout, "forward", params)

    def _reduced_s(self, layout: Layout, part: Part, params: BlockParams) -> float:
        """Of the reductions in a backward, which gathers parameters too under ZeRO 3."""
        return self.sent_s(layout, part, params) - self._gathered_s(layout, params)

    def _reduced_of_block_s(self, layout: Layout, part: Part, block: BlockParams) -> float:
        """Seconds of the reduction of one block, by itself."""
        sent = self._sent_of(layout, part, block)
        return sent.one_after_the_other - self._gathered_s(layout, block)

    def sent_s(self, layout: Layout, part: Part, params: BlockParams) -> float:
        """Seconds of the collectives over the data ranks for the parameters of some blocks; see Note
        [Copies of shards].
        """
        sent = self._sent_of(layout, part, params)
        if sent.copies and self._speeds.link_of(layout.copies_group) != self._speeds.link_of(
            layout.data_group
        ):
            return max(sent.dense + sent.experts, sent.copies)
        return sent.one_after_the_other

    def least_sent_s(self, layout: Layout, part: Part, params: BlockParams) -> float:
        """As `sent_s`, at least: collectives on two links may be under way at once."""
        sent = self._sent_of(layout, part, params)
        groups = (layout.data_group, layout.expert_group, layout.copies_group)
        by_link: dict[Link, float] = {}
        for group, seconds in zip(groups, sent, strict=True):
            link = self._speeds.link_of(group)
            by_link[link] = by_link.get(link, 0.0) + seconds
        return max(by_link.values())

    def _sent_of(self, layout: Layout, part: Part, params: BlockParams) -> SentSeconds:
        key = (part, layout.zero, layout.degrees, params.total, params.experts, params.num_blocks)
        if key not in self._sent:
            zero = self.zero(layout)
            dense_s = zero.sent_s(
                part,
                self._speeds,
                layout.data_group,
                params=params.total - params.experts,
                num_blocks=params.num_blocks,
            )
            experts_s = zero.sent_s(
                part,
                self._speeds,
                layout.expert_group,
                params=params.experts,
                num_blocks=params.num_expert_blocks,
            )
            copies_s = self._copies_s(layout, part, params)
            self._sent[key] = SentSeconds(dense_s, experts_s, copies_s)
        return self._sent[key]

    def _copies_s(self, layout: Layout, part: Part, params: BlockParams) -> float:
        """Of the sums over copies, in a backward that reduces gradients."""
        reduces_each = layout.zero >= ZERO_THAT_REDUCES_EACH
        reduces = part == "last backward" or (part == "backward" and reduces_each)
        if not layout.has_copies or not reduces:
            return 0.0
        dense = params.total - params.experts, params.num_blocks, layout.num_data
        experts = params.experts, params.num_expert_blocks, len(layout.expert_group)
        costs = self._zeros.copies(layout.zero)
        seconds = 0.0
        for num_params, num_blocks, num_shards in (dense, experts):
            seconds += costs.sent_s(
                self._speeds,
                layout.copies_group,
                params=num_params,
                num_blocks=num_blocks,
                num_shards=num_shards,
            )
        return seconds

    def after_s(self, layout: Layout, by_rank: Sequence[BlockParams]) -> float:
        """Of the update of the rank with the most parameters."""
        most = max(by_rank)
        update_s = _held(self.zero(layout).kernels["update"], layout, most)
        return update_s + self.sent_s(layout, "update", most)


def _held(cost: ParamCost, layout: Layout, params: BlockParams) -> float:
    """What parameters cost a rank; see Note [Gradients of experts]."""
    of_all = cost.of(params.total, layout.num_data)
    if not params.experts:
        return of_all
    if_dense = cost.of(params.experts, layout.num_data)
    return of_all - if_dense + cost.of(params.experts, len(layout.expert_group))
