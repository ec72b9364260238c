"""Distribution of a step's time when actions vary at random: median, 5th and 95th percentile over many draws.

Note [Jitter]
    The kernels of each action take a factor of their predicted time, drawn anew for every action
    and rank from a lognormal distribution of mean 1; the jitter is its standard deviation. Waits
    for collectives and messages do not vary.

    Ranks that wait for each other within actions (tensor parallelism, ZeRO 3) all take the largest
    of their factors. The largest of k has the distribution function F^k, so one number is drawn for
    k ranks. The other data-parallel replicas are drawn one by one, and the step ends with the
    slowest: for n replicas with a standard deviation s that is about s sqrt(2 ln n) later than the
    mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from weft.core.dimension import pipeline_axis
from weft.core.mesh import Mesh
from weft.planner.measure.recorder import RecordedRegion, Started
from weft.planner.measure.roles import RoleCosts
from weft.planner.simulate.pipeline_time import StageMessages
from weft.planner.simulate.region_time import RegionTime
from weft.planner.simulate.step_time import StepTime
from weft.schedule.engine import play

Floats = NDArray[np.float64]
SMALLEST_TAIL = 1e-16
"""Probability beyond which no factor is drawn."""
MOST_COLUMNS = 20_000
"""Draws of a pipeline that are computed at once."""


@dataclass(frozen=True)
class Replica:
    """A rank as its pipeline coordinate and the replica of the pipeline that it belongs to."""

    row: int
    number: int


@dataclass(frozen=True)
class Replicas:
    """How the ranks of one pipeline coordinate depend on each other; see Note [Jitter].

    Attributes:
        axes: along which ranks wait for each other within actions.
        num_coupled: ranks that do.
        count: pipelines that meet at the end of a step.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    num_coupled: int
    count: int

    def of_rank(self, rank: int) -> Replica:
        """Where a world rank belongs."""
        coordinates = self.mesh.coord(rank)
        number = 0
        for axis, degree in self.mesh.axes:
            if axis != pipeline_axis() and axis not in self.axes:
                number = number * degree + coordinates[axis]
        return Replica(coordinates.get(pipeline_axis(), 0), number)


def replicas_of(roles: Sequence[RoleCosts]) -> Replicas:
    """The replicas of a measured run, from the collectives that its actions wait for."""
    mesh = roles[0].step.plan.mesh
    coupled: set[str] = set()
    for role in roles:
        for region in role.step.actions.values():
            coupled.update(_waited_axes(region))
    axes = tuple(axis for axis, degree in mesh.axes if axis in coupled and axis != pipeline_axis())
    num_coupled = mesh.degree(axes) if axes else 1
    count = mesh.size // mesh.degree(pipeline_axis()) // num_coupled
    return Replicas(mesh, axes, num_coupled, count)


def _waited_axes(region: RecordedRegion) -> set[str]:
    found: set[str] = set()
    for event in region.events:
        op = getattr(event, "op", None)
        if op is not None and not isinstance(event, Started):
            found.update(op.axis.split("+"))
    return found


@dataclass(frozen=True)
class StepDistribution:
    """A step over many draws.

    Attributes:
        seconds: of each draw, ascending.
        bubbles: of each draw in order of drawing: idle share of a pipeline's ranks between its first
            and its last action, mean of all replicas; waits for collectives count as work.
    """

    seconds: Floats
    bubbles: Floats

    def percentile(self, percent: float) -> float:
        """The time that this share of steps does not exceed."""
        return float(np.percentile(self.seconds, percent))

    @property
    def mean(self) -> float:
        """The mean over all draws."""
        return float(self.seconds.mean())

    @property
    def mean_bubble(self) -> float:
        """The mean over all draws."""
        return float(self.bubbles.mean())


class LognormalFactors:
    """Random factors of mean 1.

    Args:
        spread: standard deviation of a factor.
        seed: equal seeds give equal factors.
    """

    def __init__(self, spread: float, seed: int) -> None:
        self.sigma = math.sqrt(math.log1p(spread**2))
        self._random = np.random.default_rng(seed)

    def largest(self, num_ranks: int, columns: int) -> Floats:
        """The largest of the factors of `num_ranks` ranks, for each column."""
        uniform = self._random.random(columns)
        log_share = np.log1p(-uniform) / num_ranks
        above = -np.expm1(log_share)  # 1 - u^(1/k), not rounded to 0
        above = np.clip(above, SMALLEST_TAIL, 1 - SMALLEST_TAIL)
        quantiles = torch.special.ndtri(torch.from_numpy(above))
        normal = -quantiles.numpy()
        mean_shift = self.sigma**2 / 2
        factors: Floats = np.exp(self.sigma * normal - mean_shift)
        return factors


def step_distribution(
    step: StepTime,
    replicas: Replicas,
    *,
    jitter: float,
    draws: int,
    seed: int,
    slow: Mapping[int, float] | None = None,
    slowed: StepTime | None = None,
) -> StepDistribution:
    """The distribution of a step's time; see Note [Jitter].

    Args:
        step: the prediction without jitter and slow ranks.
        jitter: standard deviation of an action's kernels, as a share of their time.
        slow: factor of the kernels of a world rank.
        slowed: the prediction with the pipeline coordinates of slow ranks slow: its phases before
            and after the actions are taken.
    """
    factors = LognormalFactors(jitter, seed)
    slow_rows: dict[Replica, list[float]] = {}
    for rank, factor in (slow or {}).items():
        replica = replicas.of_rank(rank)
        slow_rows.setdefault(replica, []).append(factor)
    pipelines = _DrawnPipelines(step, slowed or step, replicas, factors, slow=slow_rows)
    most_at_once = max(1, MOST_COLUMNS // replicas.count)
    drawn = []
    for first in range(0, draws, most_at_once):
        num_draws = min(most_at_once, draws - first)
        drawn.append(pipelines.draw(num_draws))
    seconds = np.concatenate([block.step_s for block in drawn])
    bubbles = np.concatenate([block.bubble for block in drawn])
    return StepDistribution(np.sort(seconds), bubbles)


@dataclass(frozen=True)
class _DrawnSteps:
    """The steps of several random draws.

    Attributes:
        step_s: end of each step.
        bubble: of each step.
    """

    step_s: Floats
    bubble: Floats


@dataclass(frozen=True)
class _PlayedColumns:
    """Actions of all draws; columns are draws x replicas.

    Attributes:
        ready_at: by pipeline rank, when its actions have ended and its messages have been sent.
        last_end: of the last action of any rank.
        busy: seconds of all actions.
    """

    ready_at: list[Floats]
    last_end: Floats
    busy: Floats


@dataclass(frozen=True)
class _DrawnPipelines:
    """Draws of all replicas of a pipeline."""

    step: StepTime
    slowed: StepTime
    replicas: Replicas
    factors: LognormalFactors
    slow: Mapping[Replica, Sequence[float]]

    def draw(self, num_draws: int) -> _DrawnSteps:
        """So many draws at once."""
        played = self._play(num_draws)
        step_s = self._latest_end(played.ready_at, num_draws) + self.slowed.update_s
        bubble = self._bubble(played).reshape(num_draws, self.replicas.count)
        return _DrawnSteps(step_s, bubble.mean(axis=1))

    def _bubble(self, played: _PlayedColumns) -> Floats:
        num_ranks = len(played.ready_at)
        if num_ranks == 1:
            return np.zeros_like(played.busy)
        rank_time = num_ranks * (played.last_end - self.slowed.targets_s)
        bubble: Floats = 1.0 - played.busy / rank_time
        return bubble

    def _latest_end(self, ready_at: Sequence[Floats], num_draws: int) -> Floats:
        """When the slowest rank has come to the norm, in each draw."""
        latest: Floats | None = None
        for phase in self.slowed.phases:
            if phase.name == "reduce":
                end = ready_at[phase.rank] + (phase.end - phase.start)
                latest = end if latest is None else np.maximum(latest, end)
        assert latest is not None, "a step has reductions"
        ends: Floats = latest.reshape(num_draws, self.replicas.count).max(axis=1)
        return ends

    def _play(self, num_draws: int) -> _PlayedColumns:
        """The actions as `pipeline_time.play` plays them, with columns of draws as times."""
        played = self.step.actions
        order = played.order
        columns = num_draws * self.replicas.count
        free_at = [np.full(columns, self.slowed.targets_s) for _ in range(order.table.num_ranks)]
        messages: StageMessages[Floats] = StageMessages(order, free_at, np.maximum)
        busy = np.zeros(columns)
        last_end = np.zeros(columns)

        def run(place: int, start: Floats) -> Floats:
            seconds = self._seconds(played.times[place], order.ranks[place], num_draws)
            end: Floats = start + seconds
            np.add(busy, seconds, out=busy)
            np.maximum(last_end, end, out=last_end)
            return end

        def send(place: int, end: Floats) -> Floats:
            message_s = played.arrivals[place] - played.message_starts[place]
            _, arrival = messages.send(place, end, message_s)
            return arrival

        play(order, run, send, free_at=free_at, latest=np.maximum)
        return _PlayedColumns(messages.ready_at, last_end, busy)

    def _seconds(self, time: RegionTime, rank: int, num_draws: int) -> Floats:
        """Seconds of an action in each column of draws."""
        count = self.replicas.count
        num_coupled = self.replicas.num_coupled
        factors = self.factors.largest(num_coupled, num_draws * count)
        by_draw = factors.reshape(num_draws, count)
        for replica, slow_factors in self.slow.items():
            if replica.row != rank:
                continue
            slowest = [factor * self.factors.largest(1, num_draws) for factor in slow_factors]
            num_others = num_coupled - len(slow_factors)
            if num_others:
                slowest.append(self.factors.largest(num_others, num_draws))
            by_draw[:, replica.number] = np.max(slowest, axis=0)
        waits = time.total - time.compute
        seconds: Floats = waits + time.compute * factors
        return seconds
