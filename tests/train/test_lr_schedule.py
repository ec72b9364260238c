"""The learning rate: exact at the ends of its phases, bounded, and without jumps between them."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.config.schema import OptimConfig
from weft.train.optim import learning_rate

DECAYS = ("constant", "linear", "cosine", "wsd")


def optim(**values) -> OptimConfig:
    return OptimConfig(**{"lr": 1.0, "min_lr": 0.1, "warmup": 10, "cooldown": 0.2, **values})


@st.composite
def runs(draw):
    total = draw(st.integers(1, 500))
    chosen = optim(
        decay=draw(st.sampled_from(DECAYS)),
        lr=draw(st.floats(1e-6, 10)),
        min_lr=draw(st.floats(0, 1)),
        warmup=draw(st.integers(0, 600)),
        cooldown=draw(st.floats(0, 0.99)),
    )
    return chosen, total


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize(("step", "rate"), [(0, 0.1), (4, 0.5), (9, 1.0), (10, 1.0)])
def test_warm_up_rises_by_equal_amounts_to_the_peak(decay, step, rate):
    assert learning_rate(step, optim(decay=decay), 110) == rate


@pytest.mark.parametrize(
    ("decay", "step", "rate"),
    [
        ("constant", 109, 1.0),
        ("linear", 60, 0.55),
        ("linear", 110, 0.1),
        ("cosine", 60, 0.55),
        ("cosine", 35, 0.1 + 0.9 * (1 + 0.5**0.5) / 2),
        ("cosine", 110, 0.1),
        ("wsd", 87, 1.0),
        ("wsd", 88, 1.0),
        ("wsd", 99, 0.55),
        ("wsd", 110, 0.1),
        ("wsd", 5000, 0.1),
    ],
)
def test_decay_passes_its_corners(decay, step, rate):
    assert learning_rate(step, optim(decay=decay), 110) == pytest.approx(rate, rel=1e-12)


@given(runs())
def test_rate_is_positive_at_most_the_peak_and_falls_after_the_warm_up(run):
    chosen, total = run
    rates = [learning_rate(step, chosen, total) for step in range(total + 5)]
    for rate in rates[:total]:
        assert 0 < rate <= chosen.lr * (1 + 1e-12)
    warm = rates[: chosen.warmup]
    cold = rates[chosen.warmup :]
    assert warm == sorted(warm)
    for earlier, later in pairwise(cold):
        assert later <= earlier * (1 + 1e-12)


@given(runs())
def test_decay_ends_at_the_least_rate_and_stays(run):
    chosen, total = run
    if chosen.decay == "constant":
        end = chosen.lr
    else:
        end = chosen.min_lr * chosen.lr
    after = max(total, chosen.warmup)
    assert [learning_rate(after + late, chosen, total) for late in (0, 1, 1000)] == pytest.approx(
        [end] * 3, abs=1e-12
    )


def test_one_step_runs_at_the_peak():
    assert learning_rate(0, optim(warmup=0, decay="cosine"), 1) == 1.0


@pytest.mark.parametrize("decay", DECAYS[1:])
@pytest.mark.parametrize("lr", [3e-3, 3e-4, 1e-5])
def test_every_rate_decays_to_a_tenth_of_itself_by_default(decay, lr):
    chosen = OptimConfig(lr=lr, decay=decay)
    assert learning_rate(200, chosen, 200) == pytest.approx(lr / 10, rel=1e-12)
    assert learning_rate(199, chosen, 200) < lr


def test_cooldown_that_begins_within_the_warm_up_begins_at_its_end():
    late = optim(decay="wsd", warmup=100)
    assert [learning_rate(step, late, 110) for step in (99, 100, 105, 110)] == pytest.approx(
        [1.0, 1.0, 0.55, 0.1]
    )
