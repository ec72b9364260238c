"""Simulation of a run on a device: its step, jitter, the exchange between sites, and goodput with failures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from weft.config.schema import SiteConfig
from weft.core.mesh import WIDTH
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import RoleCosts, measure
from weft.planner.report import time_lines
from weft.planner.simulate.placed_steps import on_slowest_lane
from weft.planner.simulate.site_costs import SiteCosts, site_costs, site_json, site_text
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import StepTime, step_time
from weft.view.quantity import clock, memory, short_time
from weft.view.text import wrapped
from weft_plan.simulation.failures import HOUR_S, FailureModel, Goodput, best_goodput, goodput_at
from weft_plan.simulation.jitter import Replicas, StepDistribution, replicas_of, step_distribution

GB = 1e9


@dataclass(frozen=True)
class Jitter:
    """Random variation of actions, see Note [Jitter].

    Attributes:
        spread: standard deviation of an action's kernels, as a share of their time.
        draws: steps that are drawn.
    """

    spread: float
    draws: int


@dataclass(frozen=True)
class Failures:
    """Failures of devices, and what a checkpoint and a restart cost.

    Attributes:
        mtbf_hours: mean time between failures of one device.
        checkpoint_s: in which no step runs for a checkpoint; None: its bytes at `storage_gb_s`.
        storage_gb_s: bandwidth of the storage for all ranks together, 10^9 bytes/s.
        restart_s: from a failure to the first step.
    """

    mtbf_hours: float
    restart_s: float
    checkpoint_s: float | None = None
    storage_gb_s: float | None = None


@dataclass(frozen=True)
class RunSimulation:
    """What a run on a device is expected to do.

    Attributes:
        num_devices: one a rank.
        num_steps: of the run.
        step: without jitter and slow ranks.
        slow: factor of the kernels of a world rank.
        slowed: the step of the replica of the pipeline that slow ranks delay most; None: no rank is
            slow.
        distribution: of the step under jitter, slow ranks included.
        goodput: at the best interval between checkpoints.
        goodput_of_run: at the interval of the run; None: it saves at its end only.
        checkpoint_bytes: of one checkpoint.
        sites: the exchange between sites, beside `step_s` of an inner step; None without sites.
    """

    num_devices: int
    num_steps: int
    roles: Sequence[RoleCosts]
    speeds: Speeds
    step: StepTime
    slow: Mapping[int, float]
    slowed: StepTime | None
    jitter: Jitter | None
    distribution: StepDistribution | None
    goodput: Goodput | None
    goodput_of_run: Goodput | None
    checkpoint_bytes: float
    sites: SiteCosts | None

    @property
    def shown(self) -> StepTime:
        """The step whose timeline is drawn."""
        return self.slowed or self.step

    @property
    def step_s(self) -> float:
        """Seconds of a step: the mean of the draws, or the prediction; with its share of the
        exchange between sites.
        """
        inner_s = self.shown.total_s
        if self.distribution is not None:
            inner_s = self.distribution.mean
        return _with_exchange(inner_s, self.sites)


def simulate_on(
    run: MeasuredRun,
    speeds: Speeds,
    *,
    num_steps: int,
    save_every: int,
    site: SiteConfig,
    jitter: Jitter | None = None,
    slow: Mapping[int, float] | None = None,
    failures: Failures | None = None,
) -> RunSimulation:
    """Measure a run on the meta device and simulate it.

    Args:
        num_steps: of the run.
        save_every: steps between its checkpoints; 0: it saves at its end only.
        slow: factor of the kernels of a world rank.

    Raises:
        PlanError: the run is too large to be measured.
    """
    roles = measure(run)
    of_lane = on_slowest_lane(roles, speeds)
    step = step_time(roles, of_lane)
    replicas = replicas_of(roles)
    slow = slow or {}
    slowed = None
    if slow:
        slowed = _slowest_replica(roles, of_lane, replicas, slow)
    inner_s = (slowed or step).total_s
    distribution = None
    if jitter is not None:
        distribution = step_distribution(
            step,
            replicas,
            jitter=jitter.spread,
            draws=jitter.draws,
            seed=run.config.seed,
            slow=slow,
            slowed=slowed,
        )
        inner_s = distribution.mean
    sites = site_costs(roles, site, step_s=inner_s)
    step_s = _with_exchange(inner_s, sites)
    num_devices = run.plan.mesh.size
    checkpoint_bytes = sum(role.step.checkpoint_bytes * role.num_ranks for role in roles)
    best = None
    of_run = None
    if failures is not None:
        model = _failure_model(failures, num_devices, checkpoint_bytes)
        best = best_goodput(model, step_s=step_s)
        if save_every:
            of_run = goodput_at(model, step_s=step_s, interval_steps=save_every)
    return RunSimulation(
        num_devices=num_devices,
        num_steps=num_steps,
        roles=roles,
        speeds=speeds,
        step=step,
        slow=slow,
        slowed=slowed,
        jitter=jitter,
        distribution=distribution,
        goodput=best,
        goodput_of_run=of_run,
        checkpoint_bytes=checkpoint_bytes,
        sites=sites,
    )


def _with_exchange(inner_s: float, sites: SiteCosts | None) -> float:
    """Seconds of an inner step with its share of the waits for other sites."""
    if sites is None:
        return inner_s
    exposed_s = sites.exposed_s
    assert exposed_s is not None, "the speed of the link has been checked"
    return inner_s + exposed_s / sites.settings.every


def _slowest_replica(
    roles: Sequence[RoleCosts], speeds: Speeds, replicas: Replicas, slow: Mapping[int, float]
) -> StepTime:
    """The step of the replica of the pipeline that its slow ranks delay most."""
    rows_by_replica: dict[int, dict[int, float]] = {}
    for rank, factor in slow.items():
        place = replicas.of_rank(rank)
        rows = rows_by_replica.setdefault(place.number, {})
        others = rows.get(place.row, 1.0)
        rows[place.row] = max(factor, others)
    steps = []
    for rows in rows_by_replica.values():
        step = step_time(roles, speeds, slow=rows)
        steps.append(step)
    return max(steps, key=lambda step: step.total_s)


def _failure_model(failures: Failures, num_devices: int, checkpoint_bytes: float) -> FailureModel:
    checkpoint_s = failures.checkpoint_s
    if checkpoint_s is None:
        assert failures.storage_gb_s is not None, "a checkpoint has a time or a bandwidth"
        checkpoint_s = checkpoint_bytes / (failures.storage_gb_s * GB)
    return FailureModel.of_devices(
        num_devices,
        mtbf_hours=failures.mtbf_hours,
        checkpoint_s=checkpoint_s,
        restart_s=failures.restart_s,
    )


def simulation_lines(simulation: RunSimulation) -> Iterator[str]:
    """The simulation for a reader, in 80 columns, without the picture."""
    yield from time_lines(simulation.roles, simulation.speeds)
    if simulation.slowed is not None:
        yield from _slow_lines(simulation, simulation.slowed)
    if simulation.distribution is not None and simulation.jitter is not None:
        yield from _jitter_lines(simulation.jitter, simulation.distribution)
    if simulation.sites is not None:
        yield from site_text(simulation.sites).splitlines()
    if simulation.goodput is not None:
        yield from _failure_lines(simulation, simulation.goodput)


def _slow_lines(simulation: RunSimulation, slowed: StepTime) -> Iterator[str]:
    words = [f"{rank} x {factor:g}" for rank, factor in simulation.slow.items()]
    ranks = ", ".join(words)
    step_s = short_time(slowed.total_s)
    ratio = slowed.total_s / simulation.step.total_s
    percent = 100 * (ratio - 1)
    line = f"with slow ranks ({ranks}): {step_s}, {percent:.1f}% more"
    yield from wrapped(line, WIDTH)


def _jitter_lines(jitter: Jitter, drawn: StepDistribution) -> Iterator[str]:
    low = short_time(drawn.percentile(5))
    median = short_time(drawn.percentile(50))
    high = short_time(drawn.percentile(95))
    percent = 100 * jitter.spread
    percentiles = f"median {median}, 5% below {low}, 5% above {high}"
    yield f"jitter of {percent:g}% (standard deviation of an action's kernels):"
    yield f"  {percentiles} ({jitter.draws} steps drawn)"
    if drawn.mean_bubble:
        yield f"  bubble {100 * drawn.mean_bubble:.1f}% on average"


def _failure_lines(simulation: RunSimulation, best: Goodput) -> Iterator[str]:
    model = best.model
    num_devices = simulation.num_devices
    hours = model.mean_s * num_devices / HOUR_S
    between = clock(model.mean_s)
    rate = f"{between} ({best.failures_a_day:.2g} a day)"
    yield f"failures: a device every {hours:,.0f} h, so one of {num_devices:,} every {rate}"
    size = memory(simulation.checkpoint_bytes)
    stop = short_time(model.checkpoint_s)
    restart = short_time(model.restart_s)
    yield f"  a checkpoint ({size}) stops training for {stop}, a restart for {restart}"
    yield from _account_lines("best", best)
    account = best
    if simulation.goodput_of_run is not None:
        account = simulation.goodput_of_run
        yield from _account_lines("this run", account)
    num_steps = simulation.num_steps
    without_s = num_steps * simulation.step_s
    if account.goodput > 0:
        duration = clock(without_s / account.goodput)
        without = clock(without_s)
        yield f"  {num_steps:,} steps take {duration} instead of {without}"
    else:
        yield "  the run never ends: it fails before it can start again"


def _account_lines(whose: str, account: Goodput) -> Iterator[str]:
    duration = clock(account.interval_s)
    interval = f"{account.interval_steps:,} steps ({duration})"
    yield f"  {whose}: every {interval}: goodput {account.goodput:.1%}"
    checkpoints = f"checkpoints {account.checkpoints:.1%}"
    lost = f"lost work {account.lost:.1%}"
    restarts = f"restarts {account.restarts:.1%}"
    yield f"    {checkpoints}, {lost}, {restarts}"


def simulation_json(simulation: RunSimulation) -> dict[str, object]:
    """The simulation as JSON; times in seconds."""
    fields: dict[str, object] = {
        "hardware": simulation.speeds.hardware.name,
        "efficiency": asdict(simulation.speeds.efficiency),
        "step": _step_json(simulation.step),
        "timeline": json.loads(simulation.shown.timeline.to_json()),
        "checkpoint_bytes": simulation.checkpoint_bytes,
    }
    if simulation.slowed is not None:
        ranks = {str(rank): factor for rank, factor in simulation.slow.items()}
        fields["slow"] = {"ranks": ranks, "step": _step_json(simulation.slowed)}
    if simulation.sites is not None:
        fields["sites"] = site_json(simulation.sites)
    if simulation.distribution is not None and simulation.jitter is not None:
        fields["jitter"] = _jitter_json(simulation.jitter, simulation.distribution)
    if simulation.goodput is not None:
        fields["goodput"] = asdict(simulation.goodput)
    if simulation.goodput_of_run is not None:
        fields["goodput_of_run"] = asdict(simulation.goodput_of_run)
    return fields


def _jitter_json(jitter: Jitter, drawn: StepDistribution) -> dict[str, object]:
    fields: dict[str, object] = {
        **asdict(jitter),
        "mean_s": drawn.mean,
        "mean_bubble": drawn.mean_bubble,
    }
    for percent in (5, 50, 95):
        fields[f"p{percent}_s"] = drawn.percentile(percent)
    return fields


def _step_json(step: StepTime) -> dict[str, object]:
    return {
        "step_s": step.total_s,
        "targets_s": step.targets_s,
        "pipeline_s": step.pipeline_s,
        "reduce_s": step.reduce_s,
        "update_s": step.update_s,
        "exposed_s": dict(step.exposed_s),
        "bubble": step.bubble,
    }
