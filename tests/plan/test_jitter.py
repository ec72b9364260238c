"""Distribution of the time of a step: largest of many factors, replicas and slow ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.planner.test_region_time import SPEEDS
from tests.planner.test_step_costs import run_of
from weft.config.run import Run
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import RoleCosts, measure
from weft.planner.simulate.speeds import Speeds
from weft.planner.simulate.step_time import StepTime, step_time
from weft_plan.simulation.jitter import LognormalFactors, Replicas, replicas_of, step_distribution

LAUNCHES = Speeds(SPEEDS.hardware.with_efficiency(replace(SPEEDS.efficiency, launch_s=1e-4)))
"""Every kernel takes at least 0.1 ms: kernels are most of a step."""


@pytest.fixture(scope="module")
def roles() -> tuple[RoleCosts, ...]:
    return measure(MeasuredRun.of(run_of("--mesh pp2,dp2 --parallel.zero 1")))


def predicted(roles: tuple[RoleCosts, ...]) -> tuple[StepTime, Replicas]:
    return step_time(roles, LAUNCHES), replicas_of(roles)


def expected_largest(sigma: float, num_ranks: int) -> float:
    """E[max of k lognormal factors of mean 1], from the distribution function."""
    z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    below = torch.exp(num_ranks * torch.special.log_ndtr(z))
    density = torch.diff(below)
    middle = (z[1:] + z[:-1]) / 2
    lognormal = torch.exp(sigma * middle - sigma**2 / 2)
    return float((density * lognormal).sum())


def test_the_largest_of_many_factors_grows_as_extreme_values_do() -> None:
    """The limit: sigma sqrt(2 ln k) above."""
    factors = LognormalFactors(0.05, seed=1)
    sigma = factors.sigma
    for num_ranks in (1, 8, 128, 16_384):
        expected = expected_largest(sigma, num_ranks)
        drawn = factors.largest(num_ranks, 200_000)
        assert drawn.mean() == pytest.approx(expected, rel=1e-3), num_ranks
        if num_ranks > 1:
            deviations = math.sqrt(2 * math.log(num_ranks))
            assert 1.0 < expected < math.exp(sigma * deviations)
    of_one_rank = factors.largest(1, 200_000)
    assert of_one_rank.std() == pytest.approx(0.05, rel=0.02)


def test_one_draw_for_a_group_is_the_largest_of_its_ranks() -> None:
    factors = LognormalFactors(0.2, seed=3)
    one_by_one = factors.largest(1, 800_000).reshape(8, -1).max(axis=0)
    at_once = factors.largest(8, 100_000)
    for percent in (5, 50, 95):
        assert np.percentile(at_once, percent) == pytest.approx(
            np.percentile(one_by_one, percent), rel=5e-3
        )


def test_without_jitter_every_draw_is_the_prediction(roles: tuple[RoleCosts, ...]) -> None:
    step, replicas = predicted(roles)
    drawn = step_distribution(step, replicas, jitter=0.0, draws=3, seed=0)
    assert drawn.seconds == pytest.approx([step.total_s] * 3, rel=1e-12)
    assert drawn.bubbles == pytest.approx([step.bubble] * 3, rel=1e-9)


def test_jitter_is_deterministic_by_seed_and_makes_steps_longer(
    roles: tuple[RoleCosts, ...],
) -> None:
    step, replicas = predicted(roles)
    drawn = step_distribution(step, replicas, jitter=0.1, draws=200, seed=5)
    again = step_distribution(step, replicas, jitter=0.1, draws=200, seed=5)
    other = step_distribution(step, replicas, jitter=0.1, draws=200, seed=6)
    assert (drawn.seconds == again.seconds).all()
    assert (drawn.seconds != other.seconds).any()
    assert drawn.percentile(5) < drawn.percentile(50) < drawn.percentile(95)
    assert drawn.mean > step.total_s
    assert drawn.mean_bubble > step.bubble


def test_more_replicas_make_the_slowest_one_slower(roles: tuple[RoleCosts, ...]) -> None:
    step, replicas = predicted(roles)
    means = []
    for count in (1, 8, 64):
        many = replace(replicas, count=count)
        means.append(step_distribution(step, many, jitter=0.1, draws=300, seed=0).mean)
    assert step.total_s < means[0] < means[1] < means[2]
    first_gain = means[1] - means[0]
    second_gain = means[2] - means[1]
    per_level = second_gain / first_gain
    z_of_largest = {1: 0.0, 8: 1.4236, 64: 2.3437}
    first_step = z_of_largest[8] - z_of_largest[1]
    second_step = z_of_largest[64] - z_of_largest[8]
    expected = second_step / first_step
    assert per_level == pytest.approx(expected, rel=0.25)


def test_a_slow_rank_slows_every_draw(roles: tuple[RoleCosts, ...]) -> None:
    step, replicas = predicted(roles)
    assert (replicas.num_coupled, replicas.count) == (1, 2)
    slowed = step_time(roles, LAUNCHES, slow={1: 1.5})
    slow = step_distribution(
        step, replicas, jitter=0.0, draws=2, seed=0, slow={3: 1.5}, slowed=slowed
    )
    assert slow.seconds == pytest.approx([slowed.total_s] * 2, rel=1e-3)
    assert slow.seconds[0] > step.total_s


@pytest.mark.parametrize(
    ("flags", "axes", "coupled"),
    [
        ("--mesh pp2,dp2,tp2 --parallel.zero 1", ("tp",), 2),
        pytest.param("--mesh dp2,tp2 --parallel.zero 3", ("dp", "tp"), 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_that_wait_within_actions_are_coupled(
    flags: str, axes: tuple[str, ...], coupled: int
) -> None:
    run: Run = run_of(flags)
    replicas = replicas_of(measure(MeasuredRun.of(run)))
    assert replicas.axes == axes
    assert replicas.num_coupled == coupled
    assert replicas.count * replicas.num_coupled == run.device_mesh.size // run.device_mesh.degree(
        "pp"
    )
