"""The least recomputation with which the ranks of a run fit their memory, from measured steps: `parallel.recompute = "auto"`.

Note [Levels of recomputation]
    The layers of a rank recompute in steps, of which each saves memory and costs time:

        level 0                nothing
        level 1 ... n          the first 1 ... n of its n layers, selectively
        level n+1 ... 2n       the first 1 ... n of them fully, the others selectively

    The first layers are taken because their backward is the last one: the activations of the others
    are freed by then. Ranks are apart: under 1F1B the first ones hold more micro-batches. The
    level of a rank is found by measuring its step at a few levels, between one that does not fit
    and one that does, until these are neighbours: the level fits, and one less does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

from weft.config.hardware import GB, Hardware
from weft.core.dimension import pipeline_axis
from weft.errors import Fault, PlanError
from weft.layout.plan import Plan
from weft.layout.recomputation import KEY, MODES, RecomputeMode, RecomputePolicy, layers_of
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.rank_step import RankStep, measure_rank
from weft.planner.measure.repeated import can_be_repeated, measure_repeated
from weft.planner.measure.roles import (
    role_costs,
    row_signature,
    size_problem,
    step_copied,
    step_flops,
)
from weft.planner.measure.step_memory import step_memory
from weft.planner.simulate.predict import predict_measured
from weft.planner.simulate.speeds import Speeds

HOST_SHARE = 0.8
MOST_GUESSES = 4
"""Levels that are guessed from the peaks of others; afterwards the interval is halved."""


@dataclass(frozen=True)
class RecomputeChoice:
    """The chosen policy, and what was measured.

    Attributes:
        levels: of the rank at each pipeline coordinate.
        peaks: bytes of the rank at each pipeline coordinate.
        peaks_without: the same without recomputation.
        flops: of the step of these ranks, over those without recomputation.
        copied_gb_s: rate to the host from which the copies of offloaded layers take no time.
    """

    policy: RecomputePolicy
    levels: tuple[int, ...]
    peaks: tuple[int, ...]
    peaks_without: tuple[int, ...]
    flops: tuple[float, ...]
    copied_gb_s: float = 0.0


@dataclass(frozen=True)
class HostMemory:
    """Where activations may go.

    Attributes:
        num_bytes: for the activations of one rank.
        hardware: the device, with its rate to the host.
    """

    num_bytes: float
    hardware: Hardware


def choose_recompute(
    run: MeasuredRun, limit: float, *, host: HostMemory | None = None
) -> RecomputeChoice:
    """The least recomputation with which each rank holds at most `limit` bytes; the most where none
    does. Activations on the host instead, where that takes no time.

    Args:
        host: None: its memory or its rate is not known.

    Raises:
        PlanError: the run is too large to be measured.
    """
    plan = run.plan.model_copy(update={"recompute": "none"})
    problem = size_problem(plan, fixed_order=run.config.fixed_order)
    if problem and not can_be_repeated(plan):
        fix = f"--{KEY} selective or full"
        raise PlanError(Fault(KEY, f"auto cannot measure the layout: {problem}", fix=fix))
    measured = _MeasuredLevels(run.with_plan(plan))
    if host is not None:
        offload = replace(measured, offloads=True)
        offloaded = _choice(offload, limit)
        if any(offloaded.levels) and max(offloaded.peaks) <= limit:
            rate = offload.copied_gb_s(offloaded, host)
            if rate <= HOST_SHARE * host.hardware.host_gb_s:
                return replace(offloaded, copied_gb_s=rate)
    return _choice(measured, limit)


def _choice(measured: _MeasuredLevels, limit: float) -> RecomputeChoice:
    """The least level of each rank that fits."""
    plan = measured.run.plan
    rows = range(plan.pipeline_size)
    levels = []
    modes: list[tuple[RecomputeMode, ...]] = [() for _ in plan.stages]
    for row in rows:
        levels.append(least_level(measured.num_levels(row), partial(measured.peak, row), limit))
        for stage, of_stage in measured.modes(row, levels[row]).items():
            modes[stage] = of_stage
    flops = [measured.flops(row, levels[row]) / measured.flops(row, 0) for row in rows]
    return RecomputeChoice(
        policy=RecomputePolicy.of_modes(modes),
        levels=tuple(levels),
        peaks=tuple(measured.peak(row, levels[row]) for row in rows),
        peaks_without=tuple(measured.peak(row, 0) for row in rows),
        flops=tuple(flops),
    )


def peaks_of(run: MeasuredRun) -> tuple[int, ...]:
    """The peak of the rank at each pipeline coordinate, as the run recomputes."""
    measured = _MeasuredLevels(run)
    return tuple(measured.peak_of(row, run.plan) for row in range(run.plan.pipeline_size))


def least_level(num_levels: int, peak: Callable[[int], int], limit: float) -> int:
    """The least level whose peak is at most `limit`, of levels whose peaks fall; the last one where
    no peak is.

    Args:
        num_levels: the last level.
    """
    if peak(0) <= limit:
        return 0
    low, high = 0, num_levels
    if peak(high) > limit:
        return high
    num_guesses = 0
    while high - low > 1:
        level = (low + high) // 2
        if num_guesses < MOST_GUESSES:
            share = (peak(low) - limit) / (peak(low) - peak(high))
            level = min(max(low + int(-(-share * (high - low) // 1)), low + 1), high - 1)
            num_guesses += 1
        if peak(level) <= limit:
            high = level
        else:
            low = level
    return high


@dataclass
class _MeasuredLevels:
    """Peaks and FLOPs of ranks at levels of recomputation; equal ranks are measured once.

    Levels differ in how often blocks are repeated, and seldom in which few of them are measured
    (see Note [Repeated blocks] in `measure/repeated`): those that another level has are not
    measured again.

    Attributes:
        run: without recomputation.
        offloads: layers are offloaded in place of being recomputed.
        steps: of whole ranks.
        short_steps: of ranks with the blocks that are measured.
    """

    run: MeasuredRun
    offloads: bool = False
    steps: dict[object, RankStep] = field(default_factory=dict)
    short_steps: dict[object, RankStep] = field(default_factory=dict)

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """Equal blocks, whatever they recompute."""
        plain = self.run.plan.model_copy(update={"recompute": "none"})
        return self.run.with_plan(plain).block_kinds()

    def _layers(self, row: int) -> dict[int, tuple[str, ...]]:
        """The layers of a rank, by stage."""
        plan = self.run.plan
        return {stage: layers_of(plan.stages[stage].blocks) for stage in plan.table.stages(row)}

    def num_levels(self, row: int) -> int:
        """The last level of a rank."""
        num_layers = sum(map(len, self._layers(row).values()))
        return num_layers if self.offloads else 2 * num_layers

    def modes(self, row: int, level: int) -> Mapping[int, tuple[RecomputeMode, ...]]:
        """What the layers of a rank do at a level, by stage; see Note [Levels of recomputation]."""
        found: dict[int, tuple[RecomputeMode, ...]] = {}
        layers = self._layers(row)
        num_layers = sum(map(len, layers.values()))
        num_full = max(0, level - num_layers)
        num_recomputed = min(level, num_layers)
        modes: list[RecomputeMode] = ["none"] * num_layers
        modes[:num_recomputed] = ["selective"] * num_recomputed
        modes[:num_full] = ["full"] * num_full
        if self.offloads:
            modes[:num_recomputed] = ["offload"] * num_recomputed
        for stage, names in layers.items():
            found[stage] = tuple(modes[: len(names)])
            modes = modes[len(names) :]
        return found

    def copied_gb_s(self, choice: RecomputeChoice, host: HostMemory) -> float:
        """The rate to the host from which copies take no time, 10^9 bytes/s; infinite where the host
        has too little memory.
        """
        plan = self.run.plan.model_copy(update={"recompute": choice.policy.text})
        kinds = self.run.with_plan(plan).block_kinds()
        roles = role_costs(plan, kinds, lambda row: self._step(row, plan), has_regions=False)
        forward_s = predict_measured(roles, Speeds(host.hardware)).step.forward_s
        most = 0.0
        for role, level in zip(roles, choice.levels, strict=True):
            # What the last layer has copied is counted as on the device until its backward.
            copied = max(region.host_copied for region in role.step.actions.values())
            if max(role.memory.host, copied) > host.num_bytes:
                return math.inf
            share = level / self.num_levels(role.row)
            if share:
                most = max(most, step_copied(role.step, role.row) / (share * forward_s))
        return most / GB

    def peak(self, row: int, level: int) -> int:
        """Bytes of a rank at a level."""
        return self.peak_of(row, self._plan(row, level))

    def flops(self, row: int, level: int) -> int:
        """FLOPs of a rank at a level, in a step."""
        return step_flops(self._step(row, self._plan(row, level)), row)

    def peak_of(self, row: int, plan: Plan) -> int:
        """Bytes of a rank under a plan."""
        return step_memory(self._step(row, plan), row).peak

    def _plan(self, row: int, level: int) -> Plan:
        """The plan with a rank at a level; other ranks recompute nothing."""
        own = self.modes(row, level)
        plan = self.run.plan
        modes: list[Sequence[RecomputeMode]] = []
        for stage, each in enumerate(plan.stages):
            nothing: tuple[RecomputeMode, ...] = tuple(MODES[:1]) * len(layers_of(each.blocks))
            modes.append(own.get(stage, nothing))
        return plan.model_copy(update={"recompute": RecomputePolicy.of_modes(modes).text})

    def _step(self, row: int, plan: Plan) -> RankStep:
        run = self.run.with_plan(plan)
        modes = [tuple(plan.stage_modes(stage).values()) for stage in plan.table.stages(row)]
        signature = row_signature(plan, row, self.kinds), tuple(modes)
        if signature not in self.steps:
            rank = plan.mesh.rank(**{pipeline_axis(): row})

            def measure_plan(shortened: Plan) -> RankStep:
                modes_of = shortened.recompute_of
                blocks = tuple(
                    tuple((self.kinds[name], modes_of.get(name)) for name in each.blocks)
                    for each in shortened.stages
                )
                known = self.short_steps.get((row, blocks))
                if known is None:
                    known = measure_rank(run.with_plan(shortened), rank)
                    self.short_steps[row, blocks] = known
                return known.of_equal_blocks(shortened)

            self.steps[signature] = measure_repeated(plan, row, run.block_kinds(), measure_plan)
        return replace(self.steps[signature], row=row)
