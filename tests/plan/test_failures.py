"""Goodput of a run with failures: the closed form against a simulation of failures, and the best interval."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft_plan.simulation.failures import FailureModel, best_goodput, goodput_at


def simulated_seconds(model: FailureModel, interval_s: float, count: int) -> float:
    """Mean seconds between two checkpoints over `count` intervals, failure by failure."""
    random = np.random.default_rng(7)
    total = 0.0
    unfinished = np.full(count, interval_s + model.checkpoint_s)
    restarting = np.zeros(count, dtype=bool)
    while len(unfinished):
        needed = np.where(restarting, model.restart_s, unfinished)
        fails_at = random.exponential(model.mean_s, len(unfinished))
        has_failed = fails_at < needed
        total += float(np.minimum(fails_at, needed).sum())
        goes_on = has_failed | restarting
        restarting = has_failed[goes_on]
        unfinished = unfinished[goes_on]
    return total / count


@pytest.mark.parametrize(
    ("devices", "interval_s"), [(1_024, 3_600.0), (16_384, 1_200.0), (100_000, 600.0)]
)
def test_the_expected_time_is_that_of_simulated_failures(devices: int, interval_s: float) -> None:
    model = FailureModel.of_devices(devices, mtbf_hours=50_000, checkpoint_s=30.0, restart_s=600.0)
    measured = simulated_seconds(model, interval_s, 200_000)
    assert measured == pytest.approx(model.expected_s(interval_s), rel=0.01)


def test_the_shares_of_an_account_add_up_to_all_time() -> None:
    model = FailureModel.of_devices(16_384, mtbf_hours=50_000, checkpoint_s=60.0, restart_s=900.0)
    account = goodput_at(model, step_s=5.0, interval_steps=240)
    shares = account.goodput + account.checkpoints + account.lost + account.restarts
    assert shares == pytest.approx(1.0)
    assert account.failures_a_day == pytest.approx(24 * 16_384 / 50_000)
    assert account.goodput == pytest.approx(model.goodput(1_200.0))


@given(st.floats(1.0, 1e4), st.floats(1e2, 1e7), st.floats(0.0, 1e4))
def test_no_other_interval_is_better_than_the_best(
    checkpoint_s: float, mean_s: float, restart_s: float
) -> None:
    model = FailureModel(mean_s, checkpoint_s, restart_s)
    best = model.best_s
    for factor in (0.25, 0.8, 0.99, 1.01, 1.25, 4.0):
        goodput = model.goodput(best)
        assert goodput >= model.goodput(best * factor) * (1 - 1e-12)


def test_the_intervals_of_young_and_daly_are_near_the_best() -> None:
    """Daly's is within 0.1% of the best goodput up to checkpoints of a mean time between failures;
    Young's is the limit of rare failures.
    """
    for ratio in (1e-6, 1e-3, 0.05, 0.5):
        model = FailureModel(1e4, 1e4 * ratio, 0.0)
        root = math.sqrt(ratio / 2)
        daly_s = 2e4 * root * (1 + root / 3 + root**2 / 9) - model.checkpoint_s
        assert model.goodput(daly_s) == pytest.approx(model.goodput(model.best_s), rel=1e-3)
    rare = FailureModel(1e9, 10.0, 0.0)
    assert math.sqrt(2 * 10.0 * 1e9) == pytest.approx(rare.best_s, rel=1e-3)


def test_the_best_number_of_steps_is_whole_and_at_least_one() -> None:
    model = FailureModel.of_devices(16_384, mtbf_hours=50_000, checkpoint_s=20.0, restart_s=300.0)
    best = best_goodput(model, step_s=5.3)
    assert best.interval_steps == pytest.approx(model.best_s / 5.3, abs=1)
    for other in (best.interval_steps - 1, best.interval_steps + 1):
        account = goodput_at(model, step_s=5.3, interval_steps=other)
        assert account.goodput <= best.goodput
    assert best_goodput(model, step_s=1e6).interval_steps == 1


def test_a_job_that_always_fails_does_no_work() -> None:
    hopeless = FailureModel(1.0, 1.0, 1e6)
    account = goodput_at(hopeless, step_s=1e6, interval_steps=1)
    assert (account.goodput, account.restarts) == (0.0, 1.0)
    assert math.isinf(hopeless.expected_s(1e6))


def test_more_devices_mean_less_goodput() -> None:
    shares = []
    for devices in (1_000, 10_000, 100_000):
        model = FailureModel.of_devices(
            devices, mtbf_hours=50_000, checkpoint_s=60.0, restart_s=900.0
        )
        shares.append(best_goodput(model, step_s=5.0).goodput)
    for more, less in itertools.pairwise(shares):
        assert more > less
