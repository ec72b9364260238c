"""Costs of layouts for a search: lower bounds, simulated steps from the costs of their blocks, and measured ones.

Note [Simulated layouts]
    The seconds of a stage are those of its blocks, with the kernels that the ZeRO stage adds, beside
    the collectives over the data ranks: these take the place of the work where they take longer,
    slow it down meanwhile, and what is gathered before the first block can begin is waited for. The
    schedule's table is played with them (table_time.py). Of a long step the first micro-batches are
    played; the others take the time of the busiest rank. The peak is that of the states, the
    activations in flight, and the buffers of the ZeRO stage. Not counted are links that several
    collectives share, and waits of one action for what an earlier one has started.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from weft.config.run import Run, plan_of
from weft.core.dimension import pipeline_axis
from weft.core.model_config import BlockSpec
from weft.layout.plan import Plan, make_stages
from weft.layout.stages import least_layers, split_by_cost
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.planner.block_costs import BlockCosts, BlockMeasurements, CostsByKind, SplitShares
from weft.planner.layout_choice import Layout
from weft.planner.measure import block_kinds, role_costs
from weft.planner.pipeline_tables import PipelineTables
from weft.planner.predict import Prediction, predict_measured
from weft.planner.rank_step import RankStep, measure_rank
from weft.planner.region_costs import CostTable
from weft.planner.repeated import can_be_repeated, measure_repeated
from weft.planner.short_runs import ShortRuns
from weft.planner.speeds import Speeds
from weft.planner.table_time import StageSeconds, busiest_seconds, table_seconds
from weft.planner.zero_costs import (
    ZERO_THAT_GATHERS,
    ZERO_THAT_REDUCES_EACH,
    Part,
    ZeroCosts,
    ZeroMeasurements,
)
from weft.schedule.actions import Table
from weft.schedule.catalog import find
from weft.train.build import family_of

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
class InFlight:
    """Bytes of the activations in flight of a rank.

    Attributes:
        forward: most during a forward.
        begin: most during the first block of a backward.
        backward: most during a block of a backward that has parameters.
        others: most during one that has none.
    """

    forward: float
    begin: float
    backward: float
    others: float


@dataclass(frozen=True)
class StageWork:
    """Sums of the costs of the blocks of every stage."""

    forward_s: Sequence[float]
    backward_s: Sequence[float]
    saved_bytes: Sequence[int]


class BlockParams(NamedTuple):
    """Parameters of the blocks of a stage or rank: of all, and of the first and last that have some.

    Attributes:
        num_blocks: that have parameters.
    """

    total: float
    num_blocks: int
    first: float
    last: float

    @staticmethod
    def of(sizes: Sequence[float]) -> BlockParams:
        """Of blocks in order."""
        own = [size for size in sizes if size]
        if not own:
            return BlockParams(0.0, 0, 0.0, 0.0)
        return BlockParams(sum(own), len(own), own[0], own[-1])


@dataclass(frozen=True)
class DataSeconds:
    """Collectives of a stage over the data ranks, and kernels of the ZeRO stage, for an action.

    Attributes:
        sent: of the collectives.
        exposed: of these, or of reductions that an earlier backward has left, before the first
            kernel.
        kernels: in addition to those of the blocks.
    """

    sent: float = 0.0
    exposed: float = 0.0
    kernels: float = 0.0


class LayoutCosts:
    """Costs of the layouts of one run on one device; everything is measured once.

    Attributes:
        num_measured: layouts that were measured.
        runs: that measured blocks.
    """

    def __init__(self, run: Run, speeds: Speeds) -> None:
        self.run = run
        self.speeds = speeds
        self.kinds = block_kinds(family_of(run.model, run.lora), run.model)
        self.num_measured = 0
        self.runs = ShortRuns(run, self.kinds)
        cost_table = CostTable(speeds)
        self._blocks = BlockMeasurements(self.runs, cost_table)
        self._zeros = ZeroMeasurements(self.runs, cost_table)
        self._tables = PipelineTables()
        self._sent: dict[object, float] = {}
        self._busiest: dict[object, float] = {}
        self._held: dict[object, list[InFlight]] = {}
        self._work: dict[object, StageWork] = {}
        self._kept_costs: list[CostsByKind] = []
        self._params_of_stages: dict[object, Sequence[Sequence[float]]] = {}
        self._params_by_stage: dict[int, list[BlockParams]] = {}
        self._params_by_rank: dict[int, list[BlockParams]] = {}
        self._params_of_ranks: dict[object, Sequence[Sequence[float]]] = {}
        self._stages: dict[object, tuple[tuple[str, ...], ...]] = {}
        self._predictions: dict[Layout, Prediction] = {}

    def for_run(self, run: Run) -> LayoutCosts:
        """Costs of the same run with another batch; blocks are not measured again."""
        other = LayoutCosts(run, self.speeds)
        other.runs = self.runs
        other._blocks = self._blocks
        other._zeros = self._zeros
        other._tables = self._tables
        return other

    # measured layouts

    def predict(self, layout: Layout) -> Prediction:
        """The prediction of a layout, from all of its roles."""
        if layout not in self._predictions:
            run = layout.applied_to(self.run)
            plan = plan_of(run)

            def step_of(row: int) -> RankStep:
                rank = plan.mesh.rank(**{pipeline_axis(): row})

                def measure_plan(shortened: Plan) -> RankStep:
                    return measure_rank(run, rank, plan=shortened)

                return measure_repeated(plan, row, self.kinds, measure_plan)

            roles = role_costs(plan, self.kinds, step_of, has_regions=False)
            self._predictions[layout] = predict_measured(roles, self.speeds)
            self.num_measured += 1
        return self._predictions[layout]

    def can_be_measured(self, layout: Layout) -> bool:
        """Whether that takes seconds: blocks may be left out, or there are few."""
        plan = plan_of(layout.applied_to(self.run))
        most = max(len(stage.blocks) for stage in plan.stages) * layout.chunks
        return most <= MOST_BLOCKS_IN_FULL or can_be_repeated(plan)

    def has_stages(self, layout: Layout) -> bool:
        """Whether the model has a block for every stage, and the schedule takes the sizes."""
        num_stages = layout.degree(PP) * layout.chunks
        faults = find(layout.schedule).faults(
            ranks=layout.degree(PP),
            chunks=layout.chunks,
            microbatches=self._num_micro(layout),
        )
        return num_stages <= len(self.kinds) and not faults

    # simulated layouts

    def simulate(self, layout: Layout) -> Simulated:
        """Seconds of a step and bytes of the fullest rank; see Note [Simulated layouts]."""
        return Simulated(layout, self._simulated_s(layout), self._simulated_peak(layout))

    def _simulated_s(self, layout: Layout) -> float:
        costs = self._blocks.of(layout)
        table = self._table(layout)
        if sum(map(len, table.rows)) > MOST_SIMULATED_ACTIONS:
            return self.bound(layout, costs).seconds
        order = self._tables.order(table)
        stages = self._stage_seconds(layout, costs, is_split=bool(table.splits))
        num_more = self._num_micro(layout) - table.microbatches
        more_s = num_more * busiest_seconds(order, stages) if num_more else 0.0
        return table_seconds(order, stages) + more_s + self._after_s(layout)

    def _stage_seconds(
        self,
        layout: Layout,
        costs: CostsByKind,
        *,
        is_split: bool,
    ) -> StageSeconds:
        shares = self._blocks.split_shares(layout) if is_split else NO_SPLIT
        work = self._stage_work(layout, costs)
        return StageSeconds(
            forward=self._beside_data(layout, "forward", work.forward_s),
            backward=self._beside_data(layout, "backward", work.backward_s),
            last_backward=self._beside_data(layout, "last backward", work.backward_s),
            inputs_share=shares.inputs,
            weights_share=shares.weights,
            message_s=self._message_s(layout),
        )

    def _beside_data(self, layout: Layout, part: Part, work: Sequence[float]) -> list[float]:
        """Seconds of an action of every stage, from those of its blocks."""
        slowdown = self.speeds.efficiency.overlap_slowdown
        found = []
        for work_s, data in zip(work, self._data_seconds(layout, part), strict=True):
            hidden_s = data.sent - data.exposed
            busy_s = work_s + data.kernels + slowdown * hidden_s
            found.append(data.exposed + max(busy_s, hidden_s))
        return found

    def _data_seconds(self, layout: Layout, part: Part) -> list[DataSeconds]:
        """Of every stage."""
        known: dict[BlockParams, DataSeconds] = {}
        found = []
        for params in self._block_params(layout):
            if params not in known:
                known[params] = self._data_seconds_of(layout, part, params)
            found.append(known[params])
        return found

    def _data_seconds_of(self, layout: Layout, part: Part, params: BlockParams) -> DataSeconds:
        zero = self._zero_costs(layout)
        kernels_s = zero.kernels[part].of(params.total, layout.num_data)
        sent_s = self._sent_s(layout, part, params)
        if layout.zero < ZERO_THAT_GATHERS or not params.num_blocks:
            return DataSeconds(sent_s, 0.0, kernels_s)
        gathered_s = self._sent_s(layout, "forward", params)
        reduced_s = self._sent_s(layout, "backward", params) - gathered_s
        left_s = reduced_s / params.num_blocks
        if part == "forward":
            exposed_s = params.first / params.total * gathered_s + left_s
            return DataSeconds(sent_s + left_s, exposed_s, kernels_s)
        exposed_s = params.last / params.total * gathered_s
        return DataSeconds(sent_s - left_s, exposed_s, kernels_s)

    def _sent_s(self, layout: Layout, part: Part, params: BlockParams) -> float:
        """Seconds of the collectives over the data ranks for the parameters of some blocks."""
        key = part, layout.zero, layout.degrees, params.total, params.num_blocks
        if key not in self._sent:
            self._sent[key] = self._zero_costs(layout).sent_s(
                part,
                self.speeds,
                layout.data_group,
                params=params.total,
                num_blocks=params.num_blocks,
            )
        return self._sent[key]

    def _after_s(self, layout: Layout) -> float:
        """Of the last reduction and the optimizer of the rank with the most parameters."""
        by_rank = self._rank_params(layout)
        most = max(by_rank)
        kernels = self._zero_costs(layout).kernels["update"]
        reduced_s = self._sent_s(layout, "last backward", most)
        if layout.zero == ZERO_THAT_GATHERS:
            reduced_s -= self._sent_s(layout, "forward", most)
        last_share = max(params.first for params in by_rank) / most.total if most.total else 0.0
        update_s = kernels.of(most.total, layout.num_data) + self._sent_s(layout, "update", most)
        return update_s + last_share * reduced_s

    def _message_s(self, layout: Layout) -> float:
        """Of the output of a stage to the next pipeline rank."""
        if layout.degree(PP) == 1:
            return 0.0
        axes = [axis for axis, _ in layout.degrees]
        inside = layout.degrees[axes.index(PP) + 1 :]
        neighbour = math.prod(degree for _, degree in inside)
        return self.speeds.message_s(self._blocks.boundary_bytes(layout), 0, neighbour)

    def _simulated_peak(self, layout: Layout) -> float:
        """Bytes of the fullest rank."""
        zero = self._zero_costs(layout)
        num_data = layout.num_data
        in_flight = self._in_flight(layout, self._blocks.of(layout))
        peaks = []
        for sizes, own in zip(self._by_rank(layout), in_flight, strict=True):
            states = zero.states.of(sum(sizes), num_data)
            block = _mean_of_neighbours(sizes)
            forward = own.forward + zero.forward_peak.of(block, num_data)
            backward = own.backward + zero.backward_peak.of(block, num_data)
            others = own.others + zero.carried.of(2 * block, num_data)
            peaks.append(states + max(forward, backward, others))
        return max(peaks)

    # lower bounds

    def group_bound(self, layout: Layout, most_chunks: int) -> float:
        """Seconds of a step at least, with any schedule of up to so many chunks a rank: of a rank
        with an equal share of the work, which begins when the ranks before it have done a chunk.
        """
        costs = self._blocks.bounds(layout)
        forward = sum(costs[kind].forward_s * count for kind, count in self._counts.items())
        backward = sum(costs[kind].backward_s * count for kind, count in self._counts.items())
        ranks = layout.degree(PP)
        busy = self._num_micro(layout) * (forward + backward) / ranks
        first_chunks = forward * (ranks - 1) / (ranks * most_chunks)
        return busy + first_chunks

    @cached_property
    def _counts(self) -> Counter[str]:
        """Blocks of the model by kind."""
        return Counter(self.kinds.values())

    @cached_property
    def _specs(self) -> tuple[BlockSpec, ...]:
        return self.run.model.block_specs(self.run.data.seq_len)

    def blocks(self, layout: Layout) -> CostsByKind:
        """The costs of each kind of block under the sharding of a layout, on one pipeline rank."""
        return self._blocks.of(layout)

    def larger_blocks(self, layout: Layout) -> CostsByKind:
        """What each kind of block costs at least, from blocks with a larger part of a batch."""
        return self._blocks.bounds(layout, has_own_recompute=True)

    def state_bytes(self, layout: Layout) -> float:
        """Bytes between steps of the rank with the most parameters."""
        states = self._zero_costs(layout).states
        most = max(map(sum, self._by_rank(layout)))
        return states.of(most, layout.num_data)

    def bound(self, layout: Layout, costs: CostsByKind) -> Bound:
        """What a layout needs at least, from the costs of its blocks: the rank that is busiest from
        its first input to its last output; states and activations in flight.

        Args:
            costs: `blocks` or `larger_blocks` of the layout.
        """
        in_flight = self._in_flight(layout, costs)
        states = self._zero_costs(layout).states
        num_data = layout.num_data
        peaks = []
        for sizes, own in zip(self._by_rank(layout), in_flight, strict=True):
            peaks.append(states.of(sum(sizes), num_data) + max(own.forward, own.begin))
        return Bound(self._busiest_s(layout, costs), max(peaks), self.state_bytes(layout))

    def _shape(self, layout: Layout) -> tuple[object, ...]:
        """What a layout's pipeline depends on."""
        num_micro = self._num_micro(layout)
        return layout.degree(PP), layout.schedule, layout.chunks, layout.split, num_micro

    def _busiest_s(self, layout: Layout, costs: CostsByKind) -> float:
        """Seconds of the rank that is busiest from its first input to its last output."""
        reduces_each = layout.zero >= ZERO_THAT_REDUCES_EACH
        sending = (layout.zero, layout.degrees) if reduces_each else None
        key = self._shape(layout), id(costs), sending
        if key not in self._busiest:
            self._kept_costs.append(costs)  # so that its id stays its own
            self._busiest[key] = max(self._rank_seconds(layout, costs))
        return self._busiest[key]

    def _rank_seconds(self, layout: Layout, costs: CostsByKind) -> Iterator[float]:
        table = self._table(layout)
        work = self._stage_work(layout, costs)
        num_micro = self._num_micro(layout)
        for rank, own in enumerate(self._tables.stages_of_ranks(table)):
            work_s = sum(work.forward_s[stage] + work.backward_s[stage] for stage in own)
            busy = num_micro * work_s
            if layout.zero >= ZERO_THAT_REDUCES_EACH:
                params = self._rank_params(layout)[rank]
                sent_s = self._sent_s(layout, "forward", params)
                sent_s += self._sent_s(layout, "backward", params)
                busy = max(busy, (num_micro - 1) * sent_s)
            before = sum(work.forward_s[: own[0]])
            after = 0.0 if table.splits else sum(work.backward_s[: own[0]])
            yield before + busy + after

    def _in_flight(self, layout: Layout, costs: CostsByKind) -> list[InFlight]:
        """Of every pipeline rank."""
        key = self._shape(layout), id(costs)
        if key not in self._held:
            self._kept_costs.append(costs)
            self._held[key] = list(self._activations(layout, costs))
        return self._held[key]

    def _activations(self, layout: Layout, costs: CostsByKind) -> Iterator[InFlight]:
        stages = self._stages_of(layout)
        saved = self._stage_work(layout, costs).saved_bytes
        for held in self._tables.most_held(self._table(layout)):
            size = sum(count * saved[stage] for stage, count in held.counts.items())
            names = stages[held.last_stage]
            blocks = [costs[self.kinds[name]] for name in names]
            has_params = [bool(count) for count in self._params_of(layout)[held.last_stage]]
            before = size - saved[held.last_stage]
            yield InFlight(
                forward=_forward_peak(before, blocks),
                begin=size + blocks[-1].backward_peak,
                backward=_backward_peak(size, blocks, has_params),
                others=_backward_peak(size, blocks, [not has for has in has_params]),
            )

    def _stage_work(self, layout: Layout, costs: CostsByKind) -> StageWork:
        key = layout.degree(PP) * layout.chunks, layout.split, id(costs)
        if key not in self._work:
            self._kept_costs.append(costs)
            forward: list[float] = []
            backward: list[float] = []
            saved: list[int] = []
            for names in self._stages_of(layout):
                blocks = [costs[self.kinds[name]] for name in names]
                forward.append(sum(block.forward_s for block in blocks))
                backward.append(sum(block.backward_s for block in blocks))
                saved.append(sum(block.saved_bytes for block in blocks))
            self._work[key] = StageWork(forward, backward, saved)
        return self._work[key]

    # layers of stages

    def can_split(self, layout: Layout) -> bool:
        """Whether the layers of its stages may be chosen."""
        is_pinned = bool(self.run.pipeline.split)
        num_stages = layout.degree(PP) * layout.chunks
        num_layers = sum(1 for block in self._specs if block.is_layer)
        return not is_pinned and 1 < num_stages <= num_layers

    def least_layers(self, layout: Layout) -> tuple[int, ...]:
        """Fewest layers that every stage may have."""
        return least_layers(self._specs, layout.degree(PP) * layout.chunks)

    def layers_of_stages(self, layout: Layout) -> tuple[int, ...]:
        """Layers of every stage."""
        is_layer = {block.name: block.is_layer for block in self._specs}
        stages = self._stages_of(layout)
        return tuple(sum(is_layer[name] for name in names) for names in stages)

    def split_by_seconds(self, layout: Layout) -> tuple[int, ...]:
        """Layers of every stage, so that the stage with the most measured seconds has the least."""
        costs = self._blocks.of(layout)
        timed = []
        for block in self._specs:
            own = costs[self.kinds[block.name]]
            nanoseconds = 1e9 * (own.forward_s + own.backward_s)
            timed.append(replace(block, flops=nanoseconds))
        names_of_stages = split_by_cost(timed, layout.degree(PP) * layout.chunks)
        is_layer = {block.name: block.is_layer for block in self._specs}
        return tuple(sum(is_layer[name] for name in names) for names in names_of_stages)

    def stage_seconds(self, layout: Layout) -> list[float]:
        """Seconds of the blocks of every stage for one micro-batch."""
        work = self._stage_work(layout, self._blocks.of(layout))
        pairs = zip(work.forward_s, work.backward_s, strict=True)
        return [forward_s + backward_s for forward_s, backward_s in pairs]

    # parameters and stages

    def _zero_costs(self, layout: Layout) -> ZeroCosts:
        return self._zeros.of(layout.zero, num_data=layout.num_data)

    def _params_of(self, layout: Layout) -> Sequence[Sequence[float]]:
        """Parameters of every block of every stage."""
        tp, ep = layout.degree(TP), layout.degree(EP)
        key = layout.degree(PP) * layout.chunks, layout.split, tp, ep
        if key not in self._params_of_stages:
            params = self.runs.params_of_kinds(tp=tp, ep=ep)
            stages = self._stages_of(layout)
            self._params_of_stages[key] = [
                [params[self.kinds[name]] for name in names] for names in stages
            ]
        return self._params_of_stages[key]

    def _block_params(self, layout: Layout) -> list[BlockParams]:
        """Parameters of every stage."""
        sizes_of_stages = self._params_of(layout)
        key = id(sizes_of_stages)
        if key not in self._params_by_stage:
            self._params_by_stage[key] = [BlockParams.of(sizes) for sizes in sizes_of_stages]
        return self._params_by_stage[key]

    def _rank_params(self, layout: Layout) -> list[BlockParams]:
        """Parameters of every pipeline rank."""
        sizes_of_ranks = self._by_rank(layout)
        key = id(sizes_of_ranks)
        if key not in self._params_by_rank:
            self._params_by_rank[key] = [BlockParams.of(sizes) for sizes in sizes_of_ranks]
        return self._params_by_rank[key]

    def _by_rank(self, layout: Layout) -> Sequence[Sequence[float]]:
        """Parameters of every block of every pipeline rank."""
        shape = layout.degree(PP), layout.schedule, layout.chunks, layout.split
        key = shape, layout.degree(TP), layout.degree(EP)
        if key not in self._params_of_ranks:
            table = self._table(layout)
            by_rank: list[list[float]] = [[] for _ in range(table.num_ranks)]
            for stage, sizes in enumerate(self._params_of(layout)):
                by_rank[table.stage_to_rank[stage]].extend(sizes)
            self._params_of_ranks[key] = by_rank
        return self._params_of_ranks[key]

    def _stages_of(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        key = layout.degree(PP) * layout.chunks, layout.split
        if key not in self._stages:
            stages = make_stages(self._specs, key[0], split=layout.split)
            self._stages[key] = tuple(stage.blocks for stage in stages)
        return self._stages[key]

    def _num_micro(self, layout: Layout) -> int:
        return layout.num_micro(self.run.batch.global_size)

    def _table(self, layout: Layout) -> Table:
        return self._tables.table(
            layout.schedule,
            ranks=layout.degree(PP),
            chunks=layout.chunks,
            num_micro=self._num_micro(layout),
        )


def _forward_peak(before: float, blocks: Sequence[BlockCosts]) -> float:
    """Most bytes during the forward of a stage that begins with so many."""
    most = before
    level = before
    for block in blocks:
        most = max(most, level + block.forward_peak)
        level += block.saved_bytes
    return most


def _backward_peak(before: float, blocks: Sequence[BlockCosts], counted: Sequence[bool]) -> float:
    """Most bytes during some blocks of the backward of a stage that begins with so many."""
    most = 0.0
    level = before
    for block, is_counted in zip(reversed(blocks), reversed(counted), strict=True):
        if is_counted:
            most = max(most, level + block.backward_peak)
        level -= block.saved_bytes
    return most


def _mean_of_neighbours(sizes: Sequence[float]) -> float:
    """The largest mean of two blocks in a row with parameters, of those of a rank."""
    own = [size for size in sizes if size]
    if len(own) < 2:
        return sum(own)
    return max(sum(pair) / 2 for pair in pairwise(own))
