"""Fit of constants to measured steps: known constants are found again, with uncertainty, scales and ranges."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from tests.planner.test_step_costs import run_of
from weft.config.efficiency import Efficiency
from weft.config.hardware import find_hardware
from weft.errors import PlanError
from weft.planner.measure.measured_run import MeasuredRun
from weft.planner.measure.roles import measure
from weft_plan.calibration.fit import BOUNDS, UNDETERMINED, _StepResiduals, fit
from weft_plan.calibration.fit_statistics import derivatives, fit_errors, quantile, ratio_range
from weft_plan.calibration.measured_steps import MeasuredStep, predict_all

A100 = find_hardware("a100")
START = Efficiency()
LAYOUTS = (
    "--mesh dp2 --parallel.zero 1",
    "--mesh tp2",
    "--mesh dp2 --model.dim 64 --batch.micro_size 4",
    "--mesh tp2 --model.dim 128 --batch.micro_size 8",
)


@pytest.fixture(scope="module")
def unmeasured() -> list[MeasuredStep]:
    return [MeasuredStep(flags, measure(MeasuredRun.of(run_of(flags))), 1.0) for flags in LAYOUTS]


def measured(steps: list[MeasuredStep], truth: Efficiency) -> list[MeasuredStep]:
    """The steps with the times that these constants give."""
    seconds = predict_all(steps, A100, truth, {})
    return [replace(step, seconds=each) for step, each in zip(steps, seconds, strict=True)]


@pytest.mark.slow
def test_the_fit_finds_the_constants_that_made_the_times(unmeasured: list[MeasuredStep]) -> None:
    truth = replace(START, launch_s=7e-6, latency_s=2e-5)
    steps = measured(unmeasured * 4, truth)
    found = fit(steps, A100, source="a test", start=START)
    assert found.median_error < 0.01
    assert found.efficiency.launch_s == pytest.approx(7e-6, rel=0.05)
    assert found.efficiency.latency_s == pytest.approx(2e-5, rel=0.1)
    assert found.efficiency.source == "a test"
    assert "network" not in found.uncertainty  # no run crosses nodes
    assert found.uncertainty["launch_s"] < 0.05


@pytest.mark.slow
def test_a_constant_without_influence_stays_at_its_start(unmeasured: list[MeasuredStep]) -> None:
    start = replace(START, gemm_half=10.0)
    steps = measured(unmeasured * 4, replace(start, launch_s=7e-6))
    noisy = []
    for number, step in enumerate(steps):
        seconds = step.seconds * (1.04 if number % 2 else 0.96)
        noisy.append(replace(step, seconds=seconds))
    found = fit(noisy, A100, source="a test", start=start)
    assert found.efficiency.gemm_half == 10.0
    assert found.uncertainty["launch_s"] < 0.1
    for name, error in found.uncertainty.items():
        has_moved = getattr(found.efficiency, name) != getattr(start, name)
        assert has_moved == (error < math.inf), name


def test_constants_end_at_their_bounds_not_beyond() -> None:
    """A hardware file with 1.000000002 in place of 1 is rejected by the command that reads it."""
    problem = _StepResiduals([], A100, START)
    names = list(BOUNDS)
    beyond = [math.log(high) + 2e-9 for _, high in BOUNDS.values()]
    found, _ = problem.values(names, beyond)
    assert [getattr(found, name) for name in names] == [high for _, high in BOUNDS.values()]


def test_a_number_without_influence_or_beside_an_equal_one_is_not_determined() -> None:
    numpy = pytest.importorskip("numpy")
    residuals = [0.01, -0.01] * 4
    own = numpy.linspace(0.1, 1.0, 8)
    shared = numpy.linspace(1.0, 0.2, 8)
    columns = [own, shared, shared, 0 * own]
    found = fit_errors(numpy.stack(columns, axis=1), residuals)
    alone, twice, again, without = found.of_numbers
    assert alone < 0.05
    assert twice > UNDETERMINED
    assert again > UNDETERMINED
    assert without == math.inf


def test_a_residual_without_its_step_is_that_of_the_mean_of_the_others() -> None:
    numpy = pytest.importorskip("numpy")
    values = [0.001, 0.003, -0.002, 0.004]
    mean = sum(values) / 4
    residuals = [value - mean for value in values]
    found = fit_errors(numpy.ones((4, 1)), residuals)
    for value, left_out in zip(values, found.left_out, strict=True):
        mean_of_others = (4 * mean - value) / 3
        assert left_out == pytest.approx(value - mean_of_others, rel=0.01)


def test_a_family_of_steps_is_left_out_together() -> None:
    """Of two families around one mean, each is predicted with the mean of the other one."""
    numpy = pytest.importorskip("numpy")
    values = [0.001, 0.003, -0.003, -0.001, -0.004]
    mean = sum(values) / 5
    residuals = [value - mean for value in values]
    jacobian = numpy.ones((5, 1))
    found = fit_errors(jacobian, residuals, ["a", "a", "b", "b", "b"])
    mean_of_a = 0.002
    mean_of_b = -0.008 / 3
    others = [mean_of_b, mean_of_b, mean_of_a, mean_of_a, mean_of_a]
    for value, other, left_out in zip(values, others, found.left_out, strict=True):
        assert left_out == pytest.approx(value - other, rel=0.05)


def test_a_fit_of_no_number_leaves_residuals_as_they_are() -> None:
    pytest.importorskip("numpy")
    residuals = [0.5, -0.5]
    none = derivatives(lambda logs: residuals, [], before=residuals, highest=[])
    assert none.shape == (2, 0)
    found = fit_errors(none, residuals)
    assert found.of_numbers == []
    assert found.left_out == pytest.approx(residuals)


@pytest.mark.slow
def test_groups_have_a_scale_of_their_own(unmeasured: list[MeasuredStep]) -> None:
    truth = replace(START, launch_s=7e-6, latency_s=2e-5)
    own = measured(unmeasured * 4, truth)
    slower = [replace(step, seconds=1.5 * step.seconds, group="slower") for step in own]
    found = fit([*own, *slower], A100, source="a test", start=START)
    assert found.scales == {"slower": pytest.approx(1.5, rel=0.02)}


def test_too_few_runs_and_times_that_are_none_are_rejected() -> None:
    roles = measure(MeasuredRun.of(run_of("--model.layers 1")))
    step = MeasuredStep("a run", roles, 1.0)
    with pytest.raises(PlanError, match="too few runs"):
        fit([step], A100, source="a test")
    steps = [replace(step, seconds=math.nan)]
    with pytest.raises(PlanError, match="has no time"):
        fit(steps, A100, source="a test")


def test_the_range_holds_four_of_five_other_ratios() -> None:
    ratios = [0.9 + 0.02 * number for number in range(19)]
    smallest, largest = ratio_range(ratios)
    assert smallest == pytest.approx(ratios[1])
    assert largest == pytest.approx(ratios[17])
    few = ratio_range(ratios[:8])
    assert few == (ratios[0], pytest.approx(ratios[7]))  # the next one is outside with 2 of 9


def test_a_family_with_many_steps_does_not_narrow_the_range() -> None:
    ratios = [0.9 + 0.02 * number for number in range(19)]
    names = [str(number) for number in range(19)]
    alike = [1.0] * 200
    narrow = ratio_range([*ratios, *alike])
    families = [*names, *["alike"] * 200]
    wide = ratio_range([*ratios, *alike], families)
    assert narrow == (pytest.approx(1.0), pytest.approx(1.0, abs=0.02))
    assert wide == pytest.approx(ratio_range([*ratios, 1.0]))


def test_a_family_with_many_steps_widens_the_range() -> None:
    ratios = [0.9 + 0.02 * number for number in range(19)]
    names = [str(number) for number in range(19)]
    families = [*names, *["slow"] * 30]
    _, high = ratio_range([*ratios, *[1.5] * 30], families)
    assert high == 1.5


def test_the_range_always_holds_the_prediction() -> None:
    assert ratio_range([1.2, 1.3])[0] == 1.0


def test_a_quantile_lies_between_its_neighbours() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.25) == 1.25
