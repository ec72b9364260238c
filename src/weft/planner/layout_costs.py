"""Costs of layouts for a search: of each block under each sharding (a lower bound of a step), and of whole layouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.comm.observe import Operation
from weft.config.run import Run, plan_of
from weft.core.dimension import default_sharding_rule
from weft.core.model_config import BlockSpec, logical_axes
from weft.core.shard import first_axes
from weft.layout.plan import Plan, make_stages
from weft.models.common.init import named_parameters
from weft.parallel.cp import AXIS as CP
from weft.parallel.dp import AXIS as DP
from weft.parallel.ep import AXIS as EP
from weft.parallel.pp import AXIS as PP
from weft.parallel.tp import AXIS as TP
from weft.planner.candidates import DEFAULT_SCHEDULE, MICRO_SIZES, Layout
from weft.planner.kernels import KernelLaunch
from weft.planner.measure import block_kinds, role_costs
from weft.planner.pipeline_time import PipelineOrder, pipeline_order
from weft.planner.played_actions import action_keys, played_microbatches, thinned
from weft.planner.predict import Prediction, predict_measured
from weft.planner.rank_step import RankStep, measure_rank
from weft.planner.recorder import RecordedRegion, Started
from weft.planner.region_costs import CostTable
from weft.planner.region_time import replay
from weft.planner.repeated import can_be_repeated, measure_repeated
from weft.planner.speeds import Speeds
from weft.planner.step_memory import boundary_bytes
from weft.planner.table_time import StageSeconds, busiest_seconds, table_seconds
from weft.schedule.actions import Act, Table
from weft.schedule.catalog import find
from weft.schedule.lower import Transfer
from weft.schedule.simulate import ACTIVATION_CHANGE
from weft.train.build import family_of
from weft.train.init_from import lazy_blocks

BLOCK_MICROBATCHES = 2
"""Micro-batches of a run that measures blocks: the first one reduces no gradients."""
MOST_BLOCKS_IN_FULL = 12
"""Blocks of a rank that are measured where none may be left out."""
LARGEST_MICRO = max(MICRO_SIZES)
DEFAULT_CONTEXT = Layout(()).context
MOST_SIMULATED_ACTIONS = 40_000
"""Of a table; the bound of a longer one stands for its time."""
FIRST_ZERO_A_MICROBATCH = 2
"""ZeRO stage from which on something is sent for every micro-batch, not only for the last one."""
ZERO_THAT_GATHERS = 3
SPLIT_SCHEDULE = "zero_bubble"
"""Whose backwards are all split; it measures both parts."""
BOUND_ROUNDS = 4
"""A table of this many micro-batches a pipeline rank stands for longer ones in a bound."""


@dataclass(frozen=True)
class BlockCosts:
    """Costs of a block on a rank for one micro-batch.

    Attributes:
        forward_s, backward_s: with the collectives that it waits for.
        saved_bytes: that live from its forward to its backward.
        forward_peak, backward_peak: bytes that live meanwhile above those at its begin.
    """

    forward_s: float
    backward_s: float
    saved_bytes: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes that a rank holds between steps for each of its parameters.

    Attributes:
        whole: on every rank.
        shared: over all ranks that hold the parameter.
    """

    whole: float
    shared: float


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
class SplitShares:
    """The parts of a split backward, as shares of a whole one."""

    inputs: float
    weights: float


@dataclass(frozen=True)
class DataSeconds:
    """What ZeRO sends for one micro-batch.

    Attributes:
        forward, backward: seconds of it during each.
        first_share, last_share: of the first and the last block, whose parameters are gathered
            before the forward and the backward can begin.
    """

    forward: float = 0.0
    backward: float = 0.0
    first_share: float = 0.0
    last_share: float = 0.0


class LayoutCosts:
    """Costs of the layouts of one run on one device; everything is measured once.

    Attributes:
        num_measured: layouts that were measured.
        num_block_runs: runs that measured blocks.
    """

    def __init__(self, run: Run, speeds: Speeds) -> None:
        self.run = run
        self.speeds = speeds
        self.kinds = block_kinds(run)
        self.num_measured = 0
        self.num_block_runs = 0
        self._table = CostTable(speeds)
        self._blocks: dict[object, dict[str, BlockCosts]] = {}
        self._bounds: dict[object, dict[str, BlockCosts]] = {}
        self._pipeline_bounds: dict[object, tuple[float, float]] = {}
        self._kept_costs: list[Mapping[str, BlockCosts]] = []
        self._held: dict[int, list[HeldActivations]] = {}
        self._states: dict[int, StateBytes] = {}
        self._params: dict[tuple[int, int], dict[str, float]] = {}
        self._rank_params: dict[object, Sequence[float]] = {}
        self._stages: dict[object, tuple[tuple[str, ...], ...]] = {}
        self._tables: dict[object, Table] = {}
        self._predictions: dict[Layout, Prediction] = {}
        self._orders: dict[int, PipelineOrder] = {}
        self._splits: dict[object, SplitShares] = {}
        self._boundaries: dict[object, int] = {}
        self._zero_steps: dict[int, RankStep] = {}

    def for_run(self, run: Run) -> LayoutCosts:
        """Costs of the same run with another batch; blocks are not measured again."""
        other = LayoutCosts(run, self.speeds)
        other._blocks = self._blocks
        other._states = self._states
        other._params = self._params
        other._splits = self._splits
        other._boundaries = self._boundaries
        other._zero_steps = self._zero_steps
        return other

    # whole layouts

    def predict(self, layout: Layout) -> Prediction:
        """The prediction of a layout, from all of its roles."""
        if layout not in self._predictions:
            run = layout.applied_to(self.run)
            plan = plan_of(run)

            def step_of(row: int) -> RankStep:
                return measure_repeated(run, plan, row, self.kinds)

            roles = role_costs(plan, self.kinds, step_of, has_regions=False)
            self._predictions[layout] = predict_measured(roles, self.speeds)
            self.num_measured += 1
        return self._predictions[layout]

    def can_be_measured(self, layout: Layout) -> bool:
        """Whether that takes seconds: blocks may be left out, or there are few; and whether the
        micro-batches that are played show all kinds of actions.
        """
        plan = plan_of(layout.applied_to(self.run))
        most = max(len(stage.blocks) for stage in plan.stages) * layout.chunks
        is_small = most <= MOST_BLOCKS_IN_FULL or can_be_repeated(plan)
        return is_small and _shows_all_actions(plan.table)

    def has_stages(self, layout: Layout) -> bool:
        """Whether the model has a block for every stage, and the schedule takes the sizes."""
        sizes = {"ranks": layout.degree(PP), "chunks": layout.chunks}
        num_micro = self._num_micro(layout)
        has_blocks = layout.degree(PP) * layout.chunks <= len(self.kinds)
        return has_blocks and not find(layout.schedule).faults(**sizes, microbatches=num_micro)

    # simulated layouts

    def simulated_s(self, layout: Layout) -> float:
        """Seconds of a step by the schedule's table with the seconds of each stage's blocks, the
        messages between stages, and the update. What ZeRO 2 and 3 send for each micro-batch takes
        the place of the work of a stage where it takes longer. Of a long step the first
        micro-batches are simulated; the others take the time of the busiest rank.
        """
        costs = self.blocks(layout)
        table = self._bound_table(layout)
        if sum(map(len, table.rows)) > MOST_SIMULATED_ACTIONS:
            return self.bound(layout, costs).seconds
        if id(table) not in self._orders:
            self._orders[id(table)] = pipeline_order(table)
        order = self._orders[id(table)]
        stages = self._stage_seconds(layout, costs, is_split=bool(table.splits))
        num_more = self._num_micro(layout) - table.microbatches
        more_s = num_more * busiest_seconds(order, stages) if num_more else 0.0
        return table_seconds(order, stages) + more_s + self._update_s(layout)

    def _stage_seconds(
        self, layout: Layout, costs: Mapping[str, BlockCosts], *, is_split: bool
    ) -> StageSeconds:
        shares = self._split_shares(layout) if is_split else SplitShares(0.0, 0.0)
        sent = self._data_seconds(layout)
        forward, backward = [], []
        for stage, names in enumerate(self._stages_of(layout)):
            blocks = [costs[self.kinds[name]] for name in names]
            forward_s = sum(block.forward_s for block in blocks)
            backward_s = sum(block.backward_s for block in blocks)
            forward.append(self._beside(forward_s, sent[stage].forward, sent[stage].first_share))
            backward.append(self._beside(backward_s, sent[stage].backward, sent[stage].last_share))
        return StageSeconds(
            forward=forward,
            backward=backward,
            inputs_share=shares.inputs,
            weights_share=shares.weights,
            message_s=self._message_s(layout),
        )

    def _beside(self, work_s: float, sent_s: float, exposed_share: float) -> float:
        """Seconds of kernels beside collectives, of which a share comes before the kernels."""
        exposed_s = exposed_share * sent_s
        hidden_s = sent_s - exposed_s
        slowed_s = work_s + self.speeds.efficiency.overlap_slowdown * hidden_s
        return exposed_s + max(slowed_s, hidden_s)

    def _data_seconds(self, layout: Layout) -> Sequence[DataSeconds]:
        """Of every stage."""
        stages = self._stages_of(layout)
        if layout.zero < FIRST_ZERO_A_MICROBATCH:
            return [DataSeconds()] * len(stages)
        self._states_of(layout.zero)
        step = self._zero_steps[layout.zero]
        measured_params = sum(self._params_of_kinds(1, 1)[name] for name in _blocks_of(step))
        group = _data_group(layout)
        params = self._params_of_kinds(layout.degree(TP), layout.degree(EP))
        seconds = {"F": 0.0, "B": 0.0}
        for key, region in step.actions.items():
            for event in region.events:
                if key.place == "first" and isinstance(event, Started):
                    op = _resized(event.op, group, 1.0)
                    seconds[key.kind] += self.speeds.operation_s(op)
        found = []
        for names in stages:
            sizes = [params[self.kinds[name]] for name in names]
            share = sum(sizes) / measured_params
            is_gathered = layout.zero == ZERO_THAT_GATHERS
            found.append(
                DataSeconds(
                    forward=share * seconds["F"],
                    backward=share * seconds["B"],
                    first_share=is_gathered * sizes[0] / sum(sizes),
                    last_share=is_gathered * sizes[-1] / sum(sizes),
                )
            )
        return found

    def _message_s(self, layout: Layout) -> float:
        """Of the output of a stage to the next pipeline rank."""
        if layout.degree(PP) == 1:
            return 0.0
        axes = [axis for axis, _ in layout.degrees]
        inside = layout.degrees[axes.index(PP) + 1 :]
        neighbour = math.prod(degree for _, degree in inside)
        size = self._boundaries[_alone(layout)]
        return self.speeds.message_s(size, 0, neighbour)

    def _split_shares(self, layout: Layout) -> SplitShares:
        """Measured on one pipeline rank, once for each degree of tp and ep."""
        key = layout.degree(TP), layout.degree(EP), layout.recompute
        if key not in self._splits:
            whole = self._thin_backward_s(layout, DEFAULT_SCHEDULE)
            split = self._thin_backward_s(layout, SPLIT_SCHEDULE)
            self._splits[key] = SplitShares(split["I"] / whole["B"], split["W"] / whole["B"])
        return self._splits[key]

    def _thin_backward_s(self, layout: Layout, schedule: str) -> dict[str, float]:
        """Seconds of an action of each kind, without the reduction of gradients."""
        run, plan = self._thin(replace(_alone(layout), schedule=schedule))
        step = measure_rank(run, 0, plan=plan)
        seconds = {}
        for key, region in step.actions.items():
            if key.place != "last":
                seconds[key.kind] = replay(self._table.region(region)).total
        return seconds

    def _update_s(self, layout: Layout) -> float:
        """Of the optimizer, and of the collectives after it: those of a thin run on two data ranks
        with the parameters and data ranks of the layout.
        """
        self._states_of(layout.zero)
        step = self._zero_steps[layout.zero]
        measured_params = sum(self._params_of_kinds(1, 1)[name] for name in _blocks_of(step))
        group = _data_group(layout)
        share = max(self._params_of_ranks(layout)) / measured_params
        sharded = 2.0 / len(group) if layout.zero else 1.0
        seconds = 0.0
        for event in step.phases["update"].events:
            if isinstance(event, KernelLaunch):
                seconds += share * sharded * self._table.kernel_s(event)
            elif isinstance(event, Started) and len(group) > 1:
                seconds += self.speeds.operation_s(_resized(event.op, group, share))
        return seconds

    # lower bounds

    def group_bound_s(self, layout: Layout, most_chunks: int) -> float:
        """Seconds of a step at least, with any schedule of up to so many chunks a rank: of a rank
        with an equal share of the work, which begins when the ranks before it have done a chunk.
        """
        costs = self.block_bounds(layout)
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

    def state_bytes(self, layout: Layout) -> float:
        """Bytes between steps of the rank with the most parameters, at least."""
        states = self._states_of(layout.zero)
        degree = layout.degree(DP) * layout.degree(CP) * layout.degree(EP)
        a_param = states.whole + states.shared / degree
        return a_param * max(self._params_of_ranks(layout))

    def bound(self, layout: Layout, costs: Mapping[str, BlockCosts]) -> Bound:
        """What a layout needs at least, from the costs of its blocks: the rank that is busiest from
        its first input to its last output; the activations in flight.

        Args:
            costs: `blocks` or `block_bounds` of the layout.
        """
        sending = (layout.zero, layout.degrees) if layout.zero >= FIRST_ZERO_A_MICROBATCH else None
        key = layout.degree(PP), layout.schedule, layout.chunks, layout.split, id(costs), sending
        num_micro = self._num_micro(layout)
        if (key, num_micro) not in self._pipeline_bounds:
            found = self._pipeline_bound(layout, costs, num_micro)
            self._pipeline_bounds[key, num_micro] = found
        seconds, in_flight = self._pipeline_bounds[key, num_micro]
        states = self.state_bytes(layout)
        return Bound(seconds, states + in_flight, states)

    def _pipeline_bound(
        self, layout: Layout, costs: Mapping[str, BlockCosts], num_micro: int
    ) -> tuple[float, float]:
        """Seconds of a step and bytes of activations in flight, at least."""
        self._kept_costs.append(costs)  # so that its id stays its own
        table = self._bound_table(layout)
        forward: list[float] = []
        backward: list[float] = []
        saved: list[int] = []
        for names in self._stages_of(layout):
            blocks = [costs[self.kinds[name]] for name in names]
            forward.append(sum(block.forward_s for block in blocks))
            backward.append(sum(block.backward_s for block in blocks))
            saved.append(sum(block.saved_bytes for block in blocks))
        sent = self._data_seconds(layout)
        seconds = 0.0
        for rank in range(table.num_ranks):
            own = table.stages(rank)
            work_s = sum(forward[stage] + backward[stage] for stage in own)
            sent_s = sum(sent[stage].forward + sent[stage].backward for stage in own)
            busy = max(num_micro * work_s, (num_micro - 1) * sent_s)
            before = sum(forward[: own[0]])
            after = 0.0 if table.splits else sum(backward[: own[0]])
            seconds = max(seconds, before + busy + after)
        sizes = []
        for held in self._most_held(table):
            size = sum(count * saved[stage] for stage, count in held.counts.items())
            blocks = [costs[self.kinds[name]] for name in self._stages_of(layout)[held.last_stage]]
            level = size - saved[held.last_stage]
            for block in blocks:
                sizes.append(level + block.forward_peak)
                level += block.saved_bytes
            sizes.append(size + blocks[-1].backward_peak)
        return seconds, max(sizes)

    def _most_held(self, table: Table) -> list[HeldActivations]:
        """For each rank the activations by stage when it holds most of them."""
        if id(table) not in self._held:
            self._held[id(table)] = [_most_held_by(row) for row in table.rows]
        return self._held[id(table)]

    def blocks(self, layout: Layout) -> dict[str, BlockCosts]:
        """The costs of each kind of block under the sharding of a layout, on one pipeline rank."""
        key = _alone(layout)
        if key not in self._blocks:
            self._blocks[key] = self._measure_blocks(_alone(layout))
        return self._blocks[key]

    def block_bounds(self, layout: Layout) -> Mapping[str, BlockCosts]:
        """What each kind of block costs at least, from larger blocks: no part of a sequence or a
        batch costs less than its share of the whole, and recomputation adds to the time.
        """
        degrees = [(axis, layout.degree(axis)) for axis in (EP, TP)]
        inner = tuple(item for item in degrees if item[1] > 1)
        whole = replace(
            layout, degrees=inner, context="ring", recompute="none", micro_size=LARGEST_MICRO
        )
        share = layout.micro_size / LARGEST_MICRO / layout.degree(CP)
        saves_all = layout.recompute == "none"
        key = inner, layout.sequence, layout.recompute, share
        if key not in self._bounds:
            found = {}
            for kind, costs in self.blocks(whole).items():
                again_s = costs.forward_s if layout.recompute == "full" and "layer" in kind else 0.0
                found[kind] = BlockCosts(
                    forward_s=share * costs.forward_s,
                    backward_s=share * (costs.backward_s + again_s),
                    saved_bytes=int(share * costs.saved_bytes) if saves_all else 0,
                    forward_peak=int(share * costs.forward_peak) if saves_all else 0,
                    backward_peak=int(share * costs.backward_peak) if saves_all else 0,
                )
            self._bounds[key] = found
        return self._bounds[key]

    def _measure_blocks(self, layout: Layout) -> dict[str, BlockCosts]:
        self.num_block_runs += 1
        run, plan = self._thin(layout)
        self._boundaries[layout] = boundary_bytes(plan, Transfer(Act("F", 0, 0), 0))
        step = measure_rank(run, 0, plan=plan)
        regions = {key.kind: region for key, region in step.actions.items() if key.place == "first"}
        forward = _segment_seconds(regions["F"], self._table)
        backward = _segment_seconds(regions["B"], self._table)
        saved = _segment_changes(regions["F"])
        forward_peaks = _segment_peaks(regions["F"])
        backward_peaks = _segment_peaks(regions["B"])
        found = {}
        for name in plan.stages[0].blocks:
            found[name] = BlockCosts(
                forward_s=forward.get(name, 0.0),
                backward_s=backward.get(name, 0.0),
                saved_bytes=saved.get(name, 0),
                forward_peak=forward_peaks.get(name, 0),
                backward_peak=backward_peaks.get(name, 0),
            )
        return found

    def _thin(self, layout: Layout) -> tuple[Run, Plan]:
        """A run of two micro-batches on the ranks of a layout, and its plan with one block of each
        kind.
        """
        run = layout.applied_to(self.run)
        num_data = layout.degree(DP) * layout.degree(EP)
        size = BLOCK_MICROBATCHES * num_data * layout.micro_size
        run = run.with_values({"batch.global_size": size})
        plan = plan_of(run)
        stage = plan.stages[0]
        blocks = tuple(dict.fromkeys(self.kinds[name] for name in stage.blocks))
        thin = stage.model_copy(update={"blocks": blocks})
        return run, plan.model_copy(update={"stages": (thin,)})

    def _states_of(self, zero: int) -> StateBytes:
        """Measured with two and with four data ranks."""
        if zero not in self._states:
            if zero:
                halved = self._kept_a_param(Layout(((DP, 2),), zero=zero))
                quartered = self._kept_a_param(Layout(((DP, 4),), zero=zero))
                shared = 4 * (halved - quartered)
                self._states[zero] = StateBytes(halved - shared / 2, shared)
            else:
                self._states[zero] = StateBytes(self._kept_a_param(Layout(())), 0.0)
        return self._states[zero]

    def _kept_a_param(self, layout: Layout) -> float:
        """Bytes between steps, and below ZeRO 2 those that the first micro-batch leaves: gradients
        that are not sharded yet.
        """
        run, plan = self._thin(layout)
        step = measure_rank(run, 0, plan=plan)
        self._zero_steps.setdefault(layout.zero, step)
        left = 0
        if layout.zero < FIRST_ZERO_A_MICROBATCH:
            first = [region for key, region in step.actions.items() if key.place == "first"]
            left = max(0, sum(region.change for region in first))
        params = self._params_of_kinds(1, 1)
        return (step.kept.total + left) / sum(params[name] for name in plan.stages[0].blocks)

    # parameters and stages

    def _params_of_kinds(self, tp: int, ep: int) -> dict[str, float]:
        """Parameters of each kind of block on a rank."""
        key = tp, ep
        if key not in self._params:
            family = family_of(self.run.model, self.run.lora)
            blocks = lazy_blocks(family, self.run.model)
            axes = family.axes(self.run.model)
            rule = default_sharding_rule()
            degrees = {TP: tp, EP: ep}
            counts = {}
            for kind in dict.fromkeys(self.kinds.values()):
                count = 0.0
                for name, param in named_parameters({kind: blocks[kind]}).items():
                    logical = first_axes(logical_axes(name, axes))
                    sharding = {rule[axis] for axis in logical if axis in rule}
                    divisor = math.prod(degrees.get(axis, 1) for axis in sharding)
                    count += param.numel() / divisor
                counts[kind] = count
            self._params[key] = counts
        return self._params[key]

    def _params_of_ranks(self, layout: Layout) -> Sequence[float]:
        """Parameters of every pipeline rank."""
        degrees = tuple(layout.degree(axis) for axis in (PP, TP, EP))
        key = (*degrees, layout.schedule, layout.chunks, layout.split)
        if key not in self._rank_params:
            params = self._params_of_kinds(layout.degree(TP), layout.degree(EP))
            table = self._bound_table(layout)
            totals = [0.0] * table.num_ranks
            for stage, names in enumerate(self._stages_of(layout)):
                of_stage = sum(params[self.kinds[name]] for name in names)
                totals[table.stage_to_rank[stage]] += of_stage
            self._rank_params[key] = totals
        return self._rank_params[key]

    def _stages_of(self, layout: Layout) -> tuple[tuple[str, ...], ...]:
        key = layout.degree(PP) * layout.chunks, layout.split
        if key not in self._stages:
            stages = make_stages(self._specs, key[0], split=layout.split)
            self._stages[key] = tuple(stage.blocks for stage in stages)
        return self._stages[key]

    def _num_micro(self, layout: Layout) -> int:
        data_ranks = layout.degree(DP) * layout.degree(EP)
        return self.run.batch.global_size // (data_ranks * layout.micro_size)

    def _bound_table(self, layout: Layout) -> Table:
        """The schedule's table, or a shorter one with as many activations in flight."""
        ranks = layout.degree(PP)
        num_micro = self._num_micro(layout)
        key = layout.schedule, ranks, layout.chunks, num_micro
        if key not in self._tables:
            schedule = find(layout.schedule)
            short = BOUND_ROUNDS * ranks
            is_shortened = short < num_micro and layout.schedule != "gpipe"
            sizes = {"ranks": ranks, "chunks": layout.chunks}
            if is_shortened and not schedule.faults(**sizes, microbatches=short):
                num_micro = short
            short_key = layout.schedule, ranks, layout.chunks, num_micro
            if short_key not in self._tables:
                self._tables[short_key] = schedule.table(ranks, layout.chunks, num_micro)
            self._tables[key] = self._tables[short_key]
        return self._tables[key]


def _alone(layout: Layout) -> Layout:
    """The layout on one pipeline and data rank: what the costs of its blocks depend on."""
    degrees = [(axis, layout.degree(axis)) for axis in (EP, CP, TP)]
    inner = tuple(item for item in degrees if item[1] > 1)
    context = layout.context if layout.degree(CP) > 1 else DEFAULT_CONTEXT
    return Layout(
        inner,
        recompute=layout.recompute,
        sequence=layout.sequence,
        context=context,
        micro_size=layout.micro_size,
    )


def _resized(op: Operation, group: tuple[int, ...], share: float) -> Operation:
    """A collective of two ranks on a larger group, with a share of the data."""
    sent = 2.0 * (len(group) - 1) / len(group)
    return replace(op, group=group, sent_bytes=round(share * sent * op.sent_bytes))


def _blocks_of(step: RankStep) -> tuple[str, ...]:
    return step.plan.stages[0].blocks


def _data_group(layout: Layout) -> tuple[int, ...]:
    """The first ranks of the world that share the gradients of dense parameters."""
    ranks = [0]
    stride = 1
    for axis, degree in reversed(layout.degrees):
        if axis in (DP, EP, CP):
            ranks = [rank + place * stride for place in range(degree) for rank in ranks]
        stride *= degree
    return tuple(ranks)


def _shows_all_actions(table: Table) -> bool:
    """Whether the micro-batches that are played have every kind of action of the table."""
    for row in range(table.num_ranks):
        played = thinned(table, played_microbatches(table, row))
        keys = set(action_keys(table, row).values())
        if not keys <= set(action_keys(played, row).values()):
            return False
    return True


def _segment_seconds(region: RecordedRegion, table: CostTable) -> dict[str, float]:
    """Seconds of each block in a region."""
    seconds: dict[str, float] = {}
    stops = [segment.first_event for segment in region.segments[1:]]
    for segment, stop in zip(region.segments, [*stops, len(region.events)], strict=True):
        part = replace(region, events=region.events[segment.first_event : stop])
        time = replay(table.region(part)).total
        seconds[segment.block] = seconds.get(segment.block, 0.0) + time
    return seconds


def _segment_changes(region: RecordedRegion) -> dict[str, int]:
    """Bytes that each block leaves."""
    changes: dict[str, int] = {}
    levels = [segment.entry_bytes for segment in region.segments[1:]]
    for segment, level in zip(region.segments, [*levels, region.exit_bytes], strict=True):
        change = level - segment.entry_bytes
        changes[segment.block] = changes.get(segment.block, 0) + change
    return changes


def _segment_peaks(region: RecordedRegion) -> dict[str, int]:
    """Most bytes that live during each block above those at its begin."""
    peaks: dict[str, int] = {}
    for segment in region.segments:
        peak = segment.peak_bytes - segment.entry_bytes
        peaks[segment.block] = max(peaks.get(segment.block, 0), peak)
    return peaks


@dataclass(frozen=True)
class HeldActivations:
    """The activations of a rank when it holds most of them.

    Attributes:
        counts: by stage.
        last_stage: of the forward that made the last one.
    """

    counts: Counter[int]
    last_stage: int


def _most_held_by(row: Sequence[Act]) -> HeldActivations:
    """The activations when a row of actions holds most of them."""
    held: Counter[int] = Counter()
    most = HeldActivations(Counter(), row[0].stage)
    num_held = 0
    num_most = 0
    for act in row:
        change = ACTIVATION_CHANGE[act.kind]
        held[act.stage] += change
        num_held += change
        if num_held > num_most:
            num_most = num_held
            most = HeldActivations(held.copy(), act.stage)
    return most
