"""Costs of a deep stage from a short one: of a run of equal blocks five are measured, and the middle one is repeated.

Note [Repeated blocks]
    What happens while a block computes depends on its neighbours: ZeRO 3 gathers the parameters of
    the next block meanwhile, and gradients of the blocks before it are still being reduced. Of five
    equal blocks in a row the middle one has two equal blocks on either side, in a forward and in a
    backward, so any number of them could stand at its place. What belongs to no block (the
    reduction, the optimizer, weight gradients of a split backward) is measured with one block more;
    the difference is added for each block that was left out. Where one block more changes
    something else, as buckets of gradients over several blocks do, all blocks are measured.
    The result equals that of all blocks, to the byte (tests/planner/test_repeated.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby

from weft.layout.plan import Plan
from weft.planner.measure.played_actions import ActionKey
from weft.planner.measure.rank_step import KeptBytes, RankStep
from weft.planner.measure.recorder import RecordedRegion
from weft.planner.measure.repeated_regions import (
    LongerRegion,
    NotPeriodicError,
    grown_region,
    repeat_block,
)

KEPT_BLOCKS = 5
"""Blocks of a run that are measured; see Note [Repeated blocks]."""
NEIGHBOURS = 2
"""Blocks on either side that have an effect on one."""


@dataclass(frozen=True)
class BlockRun:
    """Equal blocks in a row in one stage.

    Attributes:
        stage: of the pipeline.
        kind: name of the first block of the model that equals them.
        names: of the blocks.
    """

    stage: int
    kind: str
    names: tuple[str, ...]

    @property
    def left_out(self) -> tuple[str, ...]:
        """The blocks that are not measured."""
        return self.dropped(KEPT_BLOCKS)

    def dropped(self, kept: int) -> tuple[str, ...]:
        """All but the first three and the last ones, where `kept` are measured."""
        if len(self.names) <= kept:
            return ()
        start = NEIGHBOURS + 1
        return self.names[start : start - kept]


def block_runs(plan: Plan, row: int, kinds: Mapping[str, str]) -> list[BlockRun]:
    """The runs of equal blocks in the stages of a pipeline coordinate.

    Args:
        kinds: name of a block -> name of the first block that equals it.
    """
    runs = []
    for stage in plan.table.stages(row):
        for kind, members in groupby(plan.stages[stage].blocks, key=kinds.__getitem__):
            runs.append(BlockRun(stage, kind, tuple(members)))
    return runs


def measure_repeated(
    plan: Plan, row: int, kinds: Mapping[str, str], measure_plan: Callable[[Plan], RankStep]
) -> RankStep:
    """The step of a rank at a pipeline coordinate, from fewer blocks.

    Args:
        kinds: name of a block -> name of the first block that equals it.
        measure_plan: measures the rank with the blocks of a plan, as `measure_rank` does.
    """
    runs = block_runs(plan, row, kinds)
    has_left_out = any(each.left_out for each in runs)
    if has_left_out and can_be_repeated(plan):
        try:
            return _extended(plan, runs, measure_plan)
        except NotPeriodicError:
            pass
    return measure_plan(plan)


def can_be_repeated(plan: Plan) -> bool:
    """Whether blocks may be left out. Weight gradients of split backwards belong to no block, so a
    rank must have one stage; under sequence parallelism without ZeRO one bucket holds the norms of
    all blocks.
    """
    has_long_buckets = plan.zero == 0 and plan.sequence_parallel
    has_split_chunks = bool(plan.table.splits) and plan.chunks > 1
    return not has_split_chunks and not has_long_buckets


@dataclass(frozen=True)
class _Longer:
    """A rank with one block more of a kind.

    Attributes:
        run: that has it.
        step: what the rank was measured to do.
        count: how many blocks of the kind are to be added.
    """

    run: BlockRun
    step: RankStep
    count: int


def _extended(
    plan: Plan, runs: Sequence[BlockRun], measure_plan: Callable[[Plan], RankStep]
) -> RankStep:
    """The step of the whole rank.

    Raises:
        NotPeriodicError: see there.
    """
    short = measure_plan(_shortened(plan, runs))
    if short.in_fixed_order:
        raise NotPeriodicError("sums of micro-batches are of all blocks")
    longer = []
    for longest, count in _counts(runs):
        step = measure_plan(_shortened(plan, runs, longest))
        longer.append(_Longer(longest, step, count))
    actions = {}
    for key in short.actions:
        actions[key] = _extended_action(key, short, longer, runs)
    phases = {}
    for name, region in short.phases.items():
        regions = [LongerRegion(each.step.phases[name], each.count) for each in longer]
        phases[name] = grown_region(region, regions)
    num_dispatches = short.num_dispatches
    for each in longer:
        num_dispatches += each.count * (each.step.num_dispatches - short.num_dispatches)
    outer_bytes = short.outer_bytes
    for each in longer:
        outer_bytes += each.count * (each.step.outer_bytes - short.outer_bytes)
    return replace(
        short,
        plan=plan,
        kept=_grown_kept(short.kept, longer),
        outer_bytes=outer_bytes,
        actions=actions,
        phases=phases,
        num_dispatches=num_dispatches,
        regions=(),
    )


def _extended_action(
    key: ActionKey, short: RankStep, longer: Sequence[_Longer], runs: Sequence[BlockRun]
) -> RecordedRegion:
    """An action with all blocks of its stage; weight gradients of a split backward belong to none."""
    region = short.actions[key]
    if key.kind == "W":
        regions = [LongerRegion(each.step.actions[key], each.count) for each in longer]
        return grown_region(region, regions)
    stages = short.plan.table.stages(short.row)
    of_stage = [each for each in runs if each.stage == stages[key.chunk]]
    change = region.change
    for each in longer:
        chunk = stages.index(each.run.stage)
        longer_key = replace(key, chunk=chunk)
        one_more = each.step.actions[longer_key].change - short.actions[longer_key].change
        for own in of_stage:
            if own.kind == each.run.kind:
                change += one_more * len(own.left_out)
    whole = _with_left_out(region, of_stage, is_forward=key.kind == "F")
    return replace(whole, exit_bytes=region.entry_bytes + change)


def _counts(runs: Sequence[BlockRun]) -> Iterator[tuple[BlockRun, int]]:
    """For each kind of block the longest run, and how many blocks of all runs are left out."""
    counts: Counter[str] = Counter()
    longest: dict[str, BlockRun] = {}
    for each in runs:
        counts[each.kind] += len(each.left_out)
        known = longest.setdefault(each.kind, each)
        if len(each.names) > len(known.names):
            longest[each.kind] = each
    for kind, count in counts.items():
        if count:
            yield longest[kind], count


def _shortened(plan: Plan, runs: Sequence[BlockRun], longer: BlockRun | None = None) -> Plan:
    """The plan without the blocks that are left out; with one more of the run `longer`."""
    dropped: set[str] = set()
    for each in runs:
        kept = KEPT_BLOCKS + 1 if each is longer else KEPT_BLOCKS
        dropped.update(each.dropped(kept))
    return plan.with_blocks(
        [[name for name in stage.blocks if name not in dropped] for stage in plan.stages]
    )


def _with_left_out(
    region: RecordedRegion, runs: Sequence[BlockRun], *, is_forward: bool
) -> RecordedRegion:
    """The region of an action with all blocks of its stage."""
    for each in runs:
        if each.left_out:
            middle = each.names[NEIGHBOURS:-NEIGHBOURS]
            names = middle if is_forward else middle[::-1]
            region = repeat_block(region, each.names[NEIGHBOURS], names)
    return region


def _grown_kept(short: KeptBytes, longer: Sequence[_Longer]) -> KeptBytes:
    """Bytes between steps, with all blocks."""
    sizes = asdict(short)
    for each in longer:
        for name, size in asdict(each.step.kept).items():
            more = size - getattr(short, name)
            sizes[name] += each.count * more
    return KeptBytes(**sizes)
