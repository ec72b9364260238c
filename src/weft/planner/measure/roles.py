"""Costs of a training step of every role of a run: one role a pipeline coordinate, equal ones measured once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from weft.core.dimension import pipeline_axis
from weft.errors import Fault, PlanError, counted
from weft.layout.plan import Plan
from weft.parallel.ep import AXIS as EP
from weft.parallel.expert.dispatch import ExpertLoad, even_load, first_rank_load
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.overlap import StepOverlap, step_overlap
from weft.planner.measure.played_actions import action_keys, played_microbatches
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.step_memory import StepMemory, step_memory
from weft.planner.measure.step_traffic import TrafficByOperation, step_traffic


@dataclass(frozen=True)
class RoleCosts:
    """Costs of the ranks at one pipeline coordinate, which are equal.

    Attributes:
        row: pipeline coordinate.
        num_ranks: how many ranks have this role.
        memory: during a step.
        traffic: of a step and rank.
        overlap: of the same operations.
        flops: of a step and rank: multiplications and additions, recomputation included.
    """

    row: int
    num_ranks: int
    step: RankStep
    memory: StepMemory
    traffic: TrafficByOperation
    overlap: StepOverlap
    flops: int


MOST_BLOCKS = 1_000
"""Blocks of a rank times micro-batches that are played, for one role: about a minute."""
MOST_ACTIONS = 200_000
"""Actions of the whole schedule."""


def size_problem(plan: Plan, *, fixed_order: bool = False) -> str | None:
    """Why a run is too large to be measured; None if it is not.

    Args:
        fixed_order: whether gradients are added in a fixed order: more micro-batches are played.
    """
    num_actions = sum(len(row) for row in plan.table.rows)
    if num_actions > MOST_ACTIONS:
        return f"the schedule has {num_actions} actions (at most {MOST_ACTIONS} are replayed)"
    for row in range(plan.pipeline_size):
        stages = plan.table.stages(row)
        num_blocks = sum(len(plan.stages[stage].blocks) for stage in stages)
        num_played = len(played_microbatches(plan.table, row, fixed_order=fixed_order))
        if num_blocks * num_played > MOST_BLOCKS:
            most = MOST_BLOCKS // num_played
            blocks = counted(num_blocks, "block")
            return f"a rank has {blocks} (at most {most} are measured)"
    return None


def measure(run: MeasuredRun, *, load: ExpertLoad = even_load) -> tuple[RoleCosts, ...]:
    """The costs of every role of a run, in the order of pipeline coordinates.

    Args:
        load: of experts that are sharded over ep; the roles are of ranks with the first ones.

    Raises:
        PlanError: the run is too large, see `size_problem`.
    """
    plan = run.plan
    problem = size_problem(plan, fixed_order=run.config.fixed_order)
    if problem:
        raise PlanError(Fault("mesh", f"too large to be measured: {problem}"))

    def step_of(row: int) -> RankStep:
        rank = plan.mesh.rank(**{pipeline_axis(): row})
        return measure_rank(run, rank, load=load)

    return role_costs(plan, run.block_kinds(), step_of)


def role_costs(
    plan: Plan,
    kinds: Mapping[str, str],
    step_of: Callable[[int], RankStep],
    *,
    has_regions: bool = True,
) -> tuple[RoleCosts, ...]:
    """The costs of every role of a plan.

    Args:
        has_regions: whether steps have the regions between actions; else overlaps are left out.
        kinds: `MeasuredRun.block_kinds`.
        step_of: measures a pipeline coordinate; called once for equal ones.
    """
    num_ranks = plan.mesh.size // plan.pipeline_size
    measured: dict[object, RankStep] = {}
    roles = []
    for row in range(plan.pipeline_size):
        signature = row_signature(plan, row, kinds)
        if signature not in measured:
            measured[signature] = step_of(row)
        step = replace(measured[signature], row=row)
        role = RoleCosts(
            row=row,
            num_ranks=num_ranks,
            step=step,
            memory=step_memory(step, row),
            traffic=step_traffic(step, row),
            overlap=step_overlap(step, row) if has_regions else {},
            flops=step_flops(step, row),
        )
        roles.append(role)
    return tuple(roles)


def worst_load(roles: Sequence[RoleCosts]) -> ExpertLoad | None:
    """All tokens to the experts of the first rank of each expert-parallel group; None if no experts
    are sharded over ranks.

    Args:
        roles: of the run, with any load.
    """
    if not any(role.step.num_dispatches for role in roles):
        return None
    num_ranks = roles[0].step.plan.mesh.degree(EP)
    return first_rank_load(num_ranks)


@dataclass(frozen=True)
class _ChunkSignature:
    """A stage of a rank: its kinds of blocks, and whether it is at an end of the pipeline."""

    kinds: tuple[str, ...]
    is_first: bool
    is_last: bool


def row_signature(plan: Plan, row: int, kinds: Mapping[str, str]) -> object:
    """Rows with equal signatures have equal regions: equal blocks in each chunk, the same ends of
    the pipeline, and the same kinds of actions.
    """
    last = plan.table.num_stages - 1
    chunks = []
    for stage in plan.table.stages(row):
        blocks = plan.stages[stage].blocks
        chunk = _ChunkSignature(
            kinds=tuple(kinds[name] for name in blocks), is_first=stage == 0, is_last=stage == last
        )
        chunks.append(chunk)
    keys = action_keys(plan.table, row)
    return tuple(chunks), frozenset(keys.values())


def step_copied(step: RankStep, row: int) -> int:
    """Bytes of activations that a rank copies to the host in a step."""
    times_of_key = Counter(action_keys(step.plan.table, row).values())
    return sum(times * step.actions[key].host_copied for key, times in times_of_key.items())


def step_flops(step: RankStep, row: int) -> int:
    """FLOPs of a rank in a step."""
    total = sum(region.flops for region in step.phases.values())
    for key, times in step.times_of_key(row).items():
        total += times * step.actions[key].flops
    return total
