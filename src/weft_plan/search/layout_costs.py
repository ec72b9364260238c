"""Costs of layouts for a search: lower bounds, simulated steps from the costs of their blocks, and measured ones.

Note [Simulated layouts]
    The seconds of a stage are those of its blocks, with the kernels that the ZeRO stage adds, beside
    the collectives over the data ranks: these take the place of the work where they take longer,
    slow it down meanwhile, and what is gathered before the first block can begin is waited for. The
    schedule's table is played with them (table_time.py). Of a long step the first micro-batches are
    played; the others take as long as those of the last round that is played. The peak is that of
    the states, the activations in flight, and the buffers of the ZeRO stage. Counted of what actions
    leave under way are reductions over the data ranks (Note [Reductions behind a backward] in
    table_time.py); not counted are links that other collectives share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.core.model_config import BlockSpec
from weft.core.node_placement import NodePlacement
from weft.core.zero_stages import MAX_UNDER_WAY, ZERO_THAT_REDUCES_EACH
from weft.layout.plan import Plan
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.repeated import can_be_repeated, measure_repeated
from weft.planner.measure.roles import role_costs
from weft.planner.simulate.order_costs import EQUAL, mesh_order
from weft.planner.simulate.predict import Prediction, predict_measured
from weft.planner.simulate.region_costs import CostTable
from weft.planner.simulate.speeds import Speeds
from weft.schedule.actions import Table
from weft.schedule.catalog import find
from weft_plan.search.block_costs import BlockMeasurements, CostsByKind, SplitShares
from weft_plan.search.candidates import LayoutGroup, PipelineChoice
from weft_plan.search.data_costs import BackwardSeconds, DataCosts
from weft_plan.search.layout_choice import Layout
from weft_plan.search.layout_stages import BlockParams, LayoutStages
from weft_plan.search.pipeline_tables import PipelineTables, SizedTable
from weft_plan.search.short_runs import ShortRuns
from weft_plan.search.stage_costs import LayoutStageCosts, StageWork
from weft_plan.search.zero_costs import LIVE_GRADIENTS, ZeroMeasurements
from weft_plan.simulation.table_time import StageCollectives, StageSeconds, table_seconds

MOST_BLOCKS_IN_FULL = 12
"""Blocks of a rank that are measured where none may be left out."""
MOST_SIMULATED_ACTIONS = 40_000
"""Of a table; the bound of a longer one stands for its time."""
NO_SPLIT = SplitShares(0.0, 0.0)


@dataclass(frozen=True)
class Bound:
    """What a layout needs at least.

    Attributes:
        seconds: of a step.
        peak_bytes: of the fullest rank.
        state_bytes: of these, between steps.
    """

    seconds: float
    peak_bytes: float
    state_bytes: float


@dataclass(frozen=True)
class Simulated:
    """A layout with its simulated step; see Note [Simulated layouts]."""

    layout: Layout
    seconds: float
    peak_bytes: float


@dataclass(frozen=True)
class StageBesideData:
    """Seconds of a stage for one micro-batch, beside its collectives over the data ranks."""

    forward_s: float
    backward: BackwardSeconds
    last_backward: BackwardSeconds
    collectives: StageCollectives


class LayoutCosts:
    """Costs of the layouts of one run on one device; everything is measured once.

    Attributes:
        num_measured: layouts that were measured.
        runs: that measured blocks.
        stages: of the layouts.
        stage_costs: of these.
    """

    def __init__(self, run: MeasuredRun, speeds: Speeds) -> None:
        self.run = run
        self.speeds = speeds
        self.kinds = run.block_kinds()
        self.num_measured = 0
        self.runs = ShortRuns(run, self.kinds)
        cost_table = CostTable(speeds)
        self._blocks = BlockMeasurements(self.runs, cost_table)
        zeros = ZeroMeasurements(self.runs.with_fewer_experts(), cost_table)
        self._data = DataCosts(zeros, speeds)
        self.stages = LayoutStages(self._specs, self.kinds, self.runs.sizes_of_kinds)
        self.stage_costs = LayoutStageCosts(self._specs, self.kinds, self._blocks, self.stages)
        self._tables = PipelineTables()
        self._most: dict[object, BlockParams] = {}
        self._leanest: dict[object, PipelineChoice] = {}
        self._busiest: dict[object, float] = {}
        self._kept_costs: list[CostsByKind] = []
        self._predictions: dict[Layout, Prediction] = {}

    def with_batch(self, global_size: int) -> LayoutCosts:
        """Costs of the same run with another batch; blocks are not measured again."""
        run = self.run.with_layout({"batch.global_size": global_size})
        other = LayoutCosts(run, self.speeds)
        other.runs = self.runs
        other._blocks = self._blocks
        other._data = self._data
        other.stages = self.stages
        other.stage_costs = self.stage_costs
        other._tables = self._tables
        return other

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence."""
        return self.run.plan.seq_len

    # measured layouts

    def predict(self, layout: Layout) -> Prediction:
        """The prediction of a layout, from all of its roles."""
        if layout not in self._predictions:
            run = self.run.with_layout(layout.values)
            plan = run.plan

            def step_of(row: int) -> RankStep:
                rank = plan.mesh.rank(**{pipeline_axis(): row})

                def measure_plan(shortened: Plan) -> RankStep:
                    return measure_rank(run.with_plan(shortened), rank)

                return measure_repeated(plan, row, self.kinds, measure_plan)

            roles = role_costs(plan, self.kinds, step_of, has_regions=False)
            self._predictions[layout] = predict_measured(roles, self.speeds)
            self.num_measured += 1
        return self._predictions[layout]

    def in_best_order(self, layout: Layout) -> Layout:
        """The layout with its axes in the order of the least predicted step."""
        hardware = self.speeds.hardware
        roles = self.predict(layout).roles
        size = roles[0].step.plan.mesh.size
        placement = self.speeds.placement or NodePlacement.even(size, hardware.node)
        order = mesh_order(roles, hardware, placement)
        if order is None or order.factor < EQUAL:
            return layout
        return replace(layout, degrees=Mesh.parse(order.best.mesh).axes)

    def can_be_measured(self, layout: Layout) -> bool:
        """Whether that takes seconds: blocks may be left out, or there are few."""
        plan = self.run.with_layout(layout.values).plan
        most_of_stage = max(len(stage.blocks) for stage in plan.stages)
        most_of_rank = most_of_stage * layout.chunks
        return most_of_rank <= MOST_BLOCKS_IN_FULL or can_be_repeated(plan)

    def has_stages(self, layout: Layout) -> bool:
        """Whether the model has a block for every stage, and the schedule takes the sizes."""
        faults = find(layout.schedule).faults(
            ranks=layout.degree(PP), chunks=layout.chunks, microbatches=self._num_micro(layout)
        )
        return self.stages.are_possible(layout) and not faults

    # simulated layouts

    def simulate(self, layout: Layout) -> Simulated:
        """Seconds of a step and bytes of the fullest rank; see Note [Simulated layouts]."""
        return Simulated(layout, self._simulated_s(layout), self._simulated_peak(layout))

    def _simulated_s(self, layout: Layout) -> float:
        costs = self._blocks.of(layout)
        table = self._table(layout)
        if table.num_actions > MOST_SIMULATED_ACTIONS:
            return self.bound(layout, costs).seconds
        stages = self._stage_seconds(layout, costs, is_split=bool(table.table.splits))
        by_rank = self.stages.params_of_ranks(layout, table.table)
        played_s = table_seconds(table.order, stages)
        more_s = self._seconds_of_more(layout, table, stages, played_s)
        after_s = self._data.after_s(layout, by_rank)
        if self.run.config.estimates_kl:  # forwards before the schedule
            forwards_s = table_seconds(table.forwards, stages)
            played_s += forwards_s * self._num_micro(layout) / table.table.microbatches
        return played_s + more_s + after_s

    def _seconds_of_more(
        self, layout: Layout, table: SizedTable, stages: StageSeconds, played_s: float
    ) -> float:
        """Seconds of the micro-batches that a shortened table leaves out: each adds as much as one
        of its last round, of a micro-batch for each pipeline rank, adds to a table without that.
        """
        num_played = table.table.microbatches
        num_more = self._num_micro(layout) - num_played
        if not num_more:
            return 0.0
        ranks = layout.degree(PP)
        shorter = self._tables.table(
            layout.schedule, ranks=ranks, chunks=layout.chunks, num_micro=num_played - ranks
        )
        round_s = played_s - table_seconds(shorter.order, stages)
        return num_more * round_s / ranks

    def _stage_seconds(self, layout: Layout, costs: CostsByKind, *, is_split: bool) -> StageSeconds:
        shares = self._blocks.split_shares(layout) if is_split else NO_SPLIT
        work = self.stage_costs.work(layout, costs)
        params = self.stages.params(layout)
        beside = self._seconds_beside(layout, work, params)
        return StageSeconds(
            forward=[each.forward_s for each in beside],
            backward=[each.backward.seconds for each in beside],
            last_backward=[each.last_backward.seconds for each in beside],
            inputs_share=shares.inputs,
            weights_share=shares.weights,
            message_s=self._message_s(layout),
            collectives=[each.collectives for each in beside],
            shares_link=self.speeds.separates_reductions,
        )

    def _seconds_beside(
        self, layout: Layout, work: StageWork, params: Sequence[BlockParams]
    ) -> list[StageBesideData]:
        """Of every stage, beside its collectives over the data ranks."""
        data = self._data
        known: dict[object, StageBesideData] = {}
        found = []
        for forward_s, backward_s, own in zip(work.forward_s, work.backward_s, params, strict=True):
            key = forward_s, backward_s, own
            if key not in known:
                every = data.backward_s(layout, "backward", backward_s, own)
                last = data.backward_s(layout, "last backward", backward_s, own)
                known[key] = StageBesideData(
                    forward_s=data.forward_s(layout, forward_s, own),
                    backward=every,
                    last_backward=last,
                    collectives=data.collectives(layout, own, every, last),
                )
            found.append(known[key])
        return found

    def _message_s(self, layout: Layout) -> float:
        """Of the output of a stage to the next pipeline rank."""
        if layout.degree(PP) == 1:
            return 0.0
        stride = 1
        for axis, degree in reversed(layout.degrees):
            if axis == PP:
                break
            stride *= degree
        num_bytes = self._blocks.boundary_bytes(layout)
        return self.speeds.message_s(num_bytes, 0, stride)

    def _simulated_peak(self, layout: Layout) -> float:
        """Bytes of the fullest rank."""
        zero = self._data.zero(layout)
        num_data = layout.num_data
        has_expert_groups = layout.degree(EP) > 1  # two groups a block
        num_under_way = 1 if has_expert_groups else MAX_UNDER_WAY
        table = self._table(layout)
        params_left = self._params_left_under_way(layout, table.table, num_under_way)
        in_flight = self.stage_costs.in_flight(layout, table, self._blocks.of(layout))
        sizes_of_ranks = self.stages.sizes_of_ranks(layout, table.table)
        params_of_ranks = self.stages.params_of_ranks(layout, table.table)
        peaks = []
        for rank, own in enumerate(in_flight):
            sizes = sizes_of_ranks[rank]
            states = self._data.state_bytes(layout, params_of_ranks[rank])
            block = _mean_of_neighbours(sizes)
            live = _most_params(sizes, num_under_way + 1) / LIVE_GRADIENTS
            carried = zero.carried.of(params_left[rank], num_data)
            forward = own.forward + zero.forward_peak.of(block, num_data) + carried
            backward = own.backward + zero.backward_peak.of(live, num_data)
            others = own.others + carried
            peaks.append(states + max(forward, backward, others))
        return max(peaks)

    def _params_left_under_way(self, layout: Layout, table: Table, num_blocks: int) -> list[float]:
        """Of each pipeline rank, parameters whose gradients are being reduced when a backward has
        ended: those of the first blocks of a stage, of so many.
        """
        most = [0.0] * table.num_ranks
        if self._num_micro(layout) == 1:
            return most
        for stage, sizes in enumerate(self.stages.sizes(layout)):
            rank = table.stage_to_rank[stage]
            own = [size for size in sizes if size]
            most[rank] = max(most[rank], sum(own[:num_blocks]))
        return most

    # lower bounds

    def group_bound(self, layout: Layout, most_chunks: int) -> float:
        """Seconds of a step at least, with any schedule of up to so many chunks a rank: of a rank
        with an equal share of the work, which begins when the ranks before it have done a chunk.
        """
        costs = self._blocks.bounds(layout)
        forward: list[float] = []
        backward: list[float] = []
        for kind, num_blocks in self._counts.items():
            forward.append(costs[kind].forward_s * num_blocks)
            backward.append(costs[kind].backward_s * num_blocks)
        forward_s = sum(forward)
        backward_s = sum(backward)
        num_ranks = layout.degree(PP)
        busy_s = self._num_micro(layout) * (forward_s + backward_s) / num_ranks
        first_chunks_s = forward_s * (num_ranks - 1) / (num_ranks * most_chunks)
        return busy_s + first_chunks_s

    @cached_property
    def _counts(self) -> Counter[str]:
        """Blocks of the model by kind."""
        return Counter(self.kinds.values())

    @cached_property
    def _specs(self) -> tuple[BlockSpec, ...]:
        return self.run.config.model.block_specs(self.seq_len)

    def blocks(self, layout: Layout) -> CostsByKind:
        """The costs of each kind of block under the sharding of a layout, on one pipeline rank."""
        return self._blocks.of(layout)

    def larger_blocks(self, layout: Layout) -> CostsByKind:
        """What each kind of block costs at least, from blocks with a larger part of a batch."""
        return self._blocks.bounds(layout, has_own_recompute=True)

    def state_bytes(self, layout: Layout) -> float:
        """Bytes between steps of the rank with the most parameters."""
        return self._data.state_bytes(layout, self._most_params(layout))

    def _most_params(self, layout: Layout) -> BlockParams:
        """Parameters of the rank with the most of them."""
        stages = layout.degree(PP), layout.schedule, layout.chunks, layout.split
        key = stages, layout.block_degrees
        if key not in self._most:
            table = self._table(layout).table
            self._most[key] = max(self.stages.params_of_ranks(layout, table))
        return self._most[key]

    def leanest_pipeline(self, group: LayoutGroup, zero: int) -> PipelineChoice:
        """Of a group's schedules the one whose fullest rank has the smallest states."""
        base = group.base
        num_sharing = base.num_data, len(base.expert_group)
        key = base.degree(PP), base.block_degrees, num_sharing, zero, group.pipelines
        if key not in self._leanest:

            def states_of(pipeline: PipelineChoice) -> float:
                return self.state_bytes(group.layout(pipeline, zero))

            self._leanest[key] = min(group.pipelines, key=states_of)
        return self._leanest[key]

    def bound(self, layout: Layout, costs: CostsByKind) -> Bound:
        """What a layout needs at least, from the costs of its blocks: the rank that is busiest from
        its first input to its last output; states and activations in flight.

        Args:
            costs: `blocks` or `larger_blocks` of the layout.
        """
        return Bound(
            self._busiest_s(layout, costs), self.least_peak(layout, costs), self.state_bytes(layout)
        )

    def least_peak(self, layout: Layout, costs: CostsByKind) -> float:
        """Bytes that the fullest rank needs at least; `costs` as for `bound`."""
        table = self._table(layout)
        params_of_ranks = self.stages.params_of_ranks(layout, table.table)
        in_flight = self.stage_costs.in_flight(layout, table, costs)
        peaks = []
        for params, own in zip(params_of_ranks, in_flight, strict=True):
            states = self._data.state_bytes(layout, params)
            peaks.append(states + max(own.forward, own.begin))
        return max(peaks)

    def _busiest_s(self, layout: Layout, costs: CostsByKind) -> float:
        """Seconds of the rank that is busiest from its first input to its last output."""
        reduces_each = layout.zero >= ZERO_THAT_REDUCES_EACH
        sending = (layout.zero, layout.degrees) if reduces_each else None
        num_micro = self._num_micro(layout)
        key = self._table(layout), num_micro, layout.split, id(costs), sending
        known = self._busiest.get(key)
        if known is None:
            self._kept_costs.append(costs)  # so that its id stays its own
            known = max(self._rank_seconds(layout, costs))
            self._busiest[key] = known
        return known

    def _rank_seconds(self, layout: Layout, costs: CostsByKind) -> Iterator[float]:
        table = self._table(layout)
        work = self.stage_costs.work(layout, costs)
        num_micro = self._num_micro(layout)
        reduces_each = layout.zero >= ZERO_THAT_REDUCES_EACH
        params = self.stages.params_of_ranks(layout, table.table)
        for rank, own in enumerate(table.stages_of_ranks):
            work_s = sum(work.forward_s[stage] + work.backward_s[stage] for stage in own)
            busy_s = num_micro * work_s
            if reduces_each:
                sent_s = self._data.least_sent_s(layout, "forward", params[rank])
                sent_s += self._data.least_sent_s(layout, "backward", params[rank])
                busy_s = max(busy_s, (num_micro - 1) * sent_s)
            first = own[0]
            before_s = sum(work.forward_s[:first])
            after_s = 0.0
            if not table.table.splits:
                after_s = sum(work.backward_s[:first])
            yield before_s + busy_s + after_s

    def can_split(self, layout: Layout) -> bool:
        """Whether the layers of its stages may be chosen."""
        return not layout.split and self.stages.can_be_split(layout)

    def _num_micro(self, layout: Layout) -> int:
        return layout.num_micro(self.run.global_size)

    def _table(self, layout: Layout) -> SizedTable:
        return self._tables.table(
            layout.schedule,
            ranks=layout.degree(PP),
            chunks=layout.chunks,
            num_micro=self._num_micro(layout),
        )


def _most_params(sizes: Sequence[float], count: int) -> float:
    """The largest sum of so many blocks in a row with parameters, of those of a rank."""
    own = [size for size in sizes if size]
    last_start = max(0, len(own) - count)
    return max(sum(own[start : start + count]) for start in range(last_start + 1))


def _mean_of_neighbours(sizes: Sequence[float]) -> float:
    """The largest mean of two blocks in a row with parameters, of those of a rank."""
    own = [size for size in sizes if size]
    if len(own) < 2:
        return sum(own)
    return max(sum(pair) / 2 for pair in pairwise(own))
