"""Jumps of the loss on the page of a run whose guard does not look for spikes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.commands.test_runs import write_run
from weft.report.figures import answers
from weft.report.loss_jumps import LEAST, loss_jumps
from weft.report.recorded_values import RunRecord


def noisy_losses(seed: int, *, num: int = 300) -> list[float]:
    """A loss that falls from 5 to 2, with noise."""
    noise = np.random.default_rng(seed).normal(0, 0.15, num)
    return [2 + 3 * math.exp(-step / 40) + float(noise[step]) for step in range(num)]


@given(st.integers(0, 1000), st.integers(LEAST, 299), st.floats(2.5, 100))
def test_a_jump_is_found_in_noise_and_nothing_else(seed: int, at: int, factor: float) -> None:
    losses = noisy_losses(seed)
    assert loss_jumps(np.array(losses)) == ()
    losses[at] *= factor
    assert [jump.at for jump in loss_jumps(np.array(losses))] == [at]


@pytest.mark.parametrize("losses", [[], [1.0], [math.nan] * 40, [0.0] * 40, [-1.0] * 39 + [5.0]])
def test_losses_without_a_median_above_0_have_no_jumps(losses: list[float]) -> None:
    assert loss_jumps(np.array(losses, dtype=np.float64)) == ()


def test_noise_as_large_as_the_loss_is_no_jump() -> None:
    """Losses of single batches near the end of MNIST: 0.001 to 0.3."""
    losses = np.random.default_rng(0).lognormal(-4, 1.5, 2000)
    assert loss_jumps(losses) == ()


def test_the_first_answer_names_the_step_where_no_guard_does(tmp_path: Path) -> None:
    losses = noisy_losses(0, num=60)
    losses[40] = 9.0
    run = RunRecord.read(write_run(tmp_path / "one", losses))
    right = answers(run)[0]
    assert right.text == "not proved; the loss jumps in 1 step"
    assert right.lines[-1].startswith("step 41: the loss is 9, ")
    guarded = RunRecord.read(write_run(tmp_path / "two", losses, guard__spike=8.0))
    assert answers(guarded)[0].text == "not proved"
