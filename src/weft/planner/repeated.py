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
from dataclasses import dataclass, replace
from itertools import groupby

from weft.config.run import Run
from weft.core.dimension import pipeline_axis
from weft.layout.plan import Plan
from weft.planner.played_actions import ActionKey
from weft.planner.rank_step import KeptBytes, RankStep, measure_rank
from weft.planner.recorder import RecordedRegion
from weft.planner.repeated_regions import LongerRegion, NotPeriodicError, grown_region, repeat_block

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
    run: Run,
    plan: Plan,
    row: int,
    kinds: Mapping[str, str],
) -> RankStep:
    """What `measure_rank` measures of the rank at a pipeline coordinate, from fewer blocks.

    Args:
        plan: of the run.
        kinds: name of a block -> name of the first block that equals it.
    """
    rank = plan.mesh.rank(**{pipeline_axis(): row})
    runs = block_runs(plan, row, kinds)
    if can_be_repeated(plan) and any(each.left_out for each in runs):
        try:
            return _extended(run, plan, rank, runs)
        except NotPeriodicError:
            pass
    return measure_rank(run, rank, plan=plan)


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
    run: Run,
    plan: Plan,
    rank: int,
    runs: Sequence[BlockRun],
) -> RankStep:
    """The step of the whole rank.

    Raises:
        NotPeriodicError: see there.
    """
    short = measure_rank(run, rank, plan=_shortened(plan, runs))
    longer = [
        _Longer(longest, measure_rank(run, rank, plan=_shortened(plan, runs, longest)), count)
        for longest, count in _counts(runs)
    ]
    actions = {}
    for key in short.actions:
        actions[key] = _extended_action(key, short, longer, runs)
    phases = {}
    for name, region in short.phases.items():
        phases[name] = grown_region(region, _regions(longer, _phase(name)))
    num_dispatches = short.num_dispatches
    for each in longer:
        num_dispatches += each.count * (each.step.num_dispatches - short.num_dispatches)
    return replace(
        short,
        plan=plan,
        kept=_grown_kept(short.kept, longer),
        actions=actions,
        phases=phases,
        num_dispatches=num_dispatches,
        regions=(),
    )


def _extended_action(
    key: ActionKey,
    short: RankStep,
    longer: Sequence[_Longer],
    runs: Sequence[BlockRun],
) -> RecordedRegion:
    """An action with all blocks of its stage; weight gradients of a split backward belong to none."""
    region = short.actions[key]
    if key.kind == "W":
        return grown_region(region, _regions(longer, _action(key)))
    stages = short.plan.table.stages(short.row)
    of_stage = [each for each in runs if each.stage == stages[key.chunk]]
    change = region.change
    for each in longer:
        longer_key = replace(key, chunk=stages.index(each.run.stage))
        one_more = each.step.actions[longer_key].change - short.actions[longer_key].change
        for own in of_stage:
            if own.kind == each.run.kind:
                change += one_more * len(own.left_out)
    whole = _with_left_out(region, of_stage, is_forward=key.kind == "F")
    return replace(whole, exit_bytes=region.entry_bytes + change)


def _counts(runs: Sequence[BlockRun]) -> Iterator[tuple[BlockRun, int]]:
    """For each kind of block the longest run, and how many blocks of all runs are left out."""
    counts: Counter[str] = Counter()
    for each in runs:
        counts[each.kind] += len(each.left_out)
    for kind, count in counts.items():
        if count:
            of_kind = [each for each in runs if each.kind == kind]
            yield max(of_kind, key=lambda each: len(each.names)), count


def _shortened(plan: Plan, runs: Sequence[BlockRun], longer: BlockRun | None = None) -> Plan:
    """The plan without the blocks that are left out; with one more of the run `longer`."""
    dropped: set[str] = set()
    for each in runs:
        dropped.update(each.dropped(KEPT_BLOCKS + (each is longer)))
    stages = []
    for stage in plan.stages:
        blocks = tuple(name for name in stage.blocks if name not in dropped)
        stages.append(stage.model_copy(update={"blocks": blocks}))
    return plan.model_copy(update={"stages": tuple(stages)})


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


RegionOf = Callable[[RankStep], RecordedRegion]


def _action(key: ActionKey) -> RegionOf:
    return lambda step: step.actions[key]


def _phase(name: str) -> RegionOf:
    return lambda step: step.phases[name]


def _regions(longer: Sequence[_Longer], region_of: RegionOf) -> list[LongerRegion]:
    return [LongerRegion(region_of(each.step), each.count) for each in longer]


def _grown_kept(short: KeptBytes, longer: Sequence[_Longer]) -> KeptBytes:
    names = ("params", "gradients", "optimizer", "buffers")
    sizes = {name: getattr(short, name) for name in names}
    for each in longer:
        for name in names:
            more = getattr(each.step.kept, name) - getattr(short, name)
            sizes[name] += each.count * more
    return KeptBytes(**sizes)
