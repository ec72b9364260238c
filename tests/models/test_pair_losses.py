"""Losses of preference pairs: numbers of TRL's own code, the formulas of the papers in plain Python, and finite gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.config.schema import DpoConfig
from weft.models.common.pair_losses import AnswerSums, kto_losses, pair_losses

CHOSEN = (-7.25, -31.5, -2.0, -0.004)
REJECTED = (-9.5, -12.75, -14.25, -0.5)
REFERENCE_CHOSEN = (-8.0, -30.0, -2.5, -0.01)
REFERENCE_REJECTED = (-9.0, -15.0, -6.0, -0.25)
NUM_CHOSEN = (5, 21, 2, 1)
NUM_REJECTED = (8, 6, 11, 3)

OF_TRL: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "sigmoid": (
        {"beta": 0.1},
        (0.6325990353171691, 0.8981232641398401, 0.3484445810050557, 0.6804290983230809),
    ),
    "sigmoid, smoothed": (
        {"beta": 0.3, "label_smoothing": 0.2},
        (0.5981232641398402, 1.181150136248315, 0.5949361996449734, 0.670844279437229),
    ),
    "hinge": ({"loss_type": "hinge", "beta": 0.3}, (0.625, 2.125, 0.0, 0.9232)),
    "ipo": (
        {"loss_type": "ipo", "beta": 0.3},
        (2.1146006944444449, 4.465171485260771, 0.44444444444444453, 2.487980444444445),
    ),
    "simpo": (
        {"loss_type": "simpo", "beta": 2.0},
        (1.3315993560394657, 0.3868710061148999, 0.64872533741634, 0.7842892315505272),
    ),
    "simpo, smoothed": (
        {"loss_type": "simpo", "beta": 2.5, "gamma": 1.4, "label_smoothing": 0.1},
        (1.9710115941780728, 0.6314443364715452, 1.0113995325163279, 1.2090590039653095),
    ),
    "orpo": (
        {"loss_type": "orpo"},
        (1.5388671972742447, 1.5386776939720832, 1.0499416205481749, 0.006185904062983182),
    ),
    "orpo, beta 1": (
        {"loss_type": "orpo", "beta": 1.0},
        (2.338671972742448, 1.8867769397208314, 1.4994162054817486, 0.025859040629831815),
    ),
}
"""What TRL computes of these sums: its `DPOTrainer` of 0.29.0 and 0.19.1 (smoothed: of 0.19.1, as the
sigmoid of 0.29 has no label smoothing), `CPOTrainer` and `ORPOTrainer` of 0.29.0 (in float64, with
the mean log-likelihood of the chosen answer).
"""

SUMS = st.floats(-60, -1e-3)
COUNTS = st.integers(1, 40)


def doubles(numbers: tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def sums_of(dpo: DpoConfig) -> tuple[AnswerSums, AnswerSums]:
    chosen = doubles(CHOSEN)
    rejected = doubles(REJECTED)
    if dpo.has_reference:
        chosen = chosen - doubles(REFERENCE_CHOSEN)
        rejected = rejected - doubles(REFERENCE_REJECTED)
    return AnswerSums(chosen, doubles(NUM_CHOSEN)), AnswerSums(rejected, doubles(NUM_REJECTED))


@pytest.mark.parametrize("name", OF_TRL)
def test_losses_are_those_of_trl(name: str) -> None:
    values, expected = OF_TRL[name]
    dpo = DpoConfig(**values)
    losses = pair_losses(*sums_of(dpo), dpo)
    assert losses.tolist() == pytest.approx(expected, rel=1e-14, abs=1e-16)


@pytest.mark.parametrize(
    ("values", "z0", "expected"),
    [
        ({"beta": 0.1}, 0.0, 0.4890440838166064),
        (
            {"beta": 0.5, "desirable_weight": 1.5, "undesirable_weight": 0.75},
            1.6875,
            0.5910100985620916,
        ),
    ],
)
def test_the_loss_of_labelled_answers_is_that_of_trl(
    values: dict[str, float], z0: float, expected: float
) -> None:
    """Its `KTOTrainer` of 1.16.0, mean over the answers; z0 is the mean of the rejected sums above,
    which is negative, and of the same with the sign of the reference exchanged.
    """
    dpo = DpoConfig(loss_type="kto", **values)
    answers, others = sums_of(dpo)
    estimate = others.logprobs.mean() * (1 if z0 == 0 else -1)
    assert float(estimate.clamp(min=0)) == z0
    losses = kto_losses(answers.logprobs, doubles((1, 0, 0, 1)), estimate.clamp(min=0), dpo)
    assert float(losses.mean()) == pytest.approx(expected, rel=1e-14)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def by_definition(chosen: float, rejected: float, nums: tuple[int, int], dpo: DpoConfig) -> float:
    """The loss of one pair, in numbers."""
    mean, other_mean = chosen / nums[0], rejected / nums[1]
    if dpo.loss_type == "hinge":
        return max(0.0, 1 - dpo.beta * (chosen - rejected))
    if dpo.loss_type == "ipo":
        return (mean - other_mean - 1 / (2 * dpo.beta)) ** 2
    if dpo.loss_type == "orpo":
        p, other = math.exp(mean), math.exp(other_mean)
        ratio = (p / (1 - p)) / (other / (1 - other))
        return -mean - dpo.beta * math.log(logistic(math.log(ratio)))
    score = dpo.beta * (chosen - rejected)
    if dpo.loss_type == "simpo":
        score = dpo.beta * (mean - other_mean) - dpo.gamma
    smoothing = dpo.label_smoothing
    right, wrong = math.log(logistic(score)), math.log(logistic(-score))
    return -(1 - smoothing) * right - smoothing * wrong


@pytest.mark.parametrize("name", OF_TRL)
@given(chosen=SUMS, rejected=SUMS, num_chosen=COUNTS, num_rejected=COUNTS)
def test_losses_are_those_of_the_papers(
    name: str, chosen: float, rejected: float, num_chosen: int, num_rejected: int
) -> None:
    dpo = DpoConfig(**OF_TRL[name][0])
    loss = pair_losses(
        AnswerSums(doubles((chosen,)), doubles((num_chosen,))),
        AnswerSums(doubles((rejected,)), doubles((num_rejected,))),
        dpo,
    )
    expected = by_definition(chosen, rejected, (num_chosen, num_rejected), dpo)
    assert loss.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("name", OF_TRL)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    dpo = DpoConfig(**OF_TRL[name][0])
    chosen, rejected = sums_of(dpo)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        right = AnswerSums(x, chosen.num_targets)
        return pair_losses(right, AnswerSums(y, rejected.num_targets), dpo)

    inputs = [sums.logprobs.clone().requires_grad_() for sums in (chosen, rejected)]
    assert torch.autograd.gradcheck(losses, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OF_TRL)
def test_answers_without_targets_or_of_probability_1_have_finite_losses_and_gradients(
    name: str, dtype: torch.dtype
) -> None:
    """Rows have fewer pairs than the table of sums has columns: what is multiplied by 0 is finite."""
    dpo = DpoConfig(**OF_TRL[name][0])
    x = torch.tensor([0.0, 0.0, -3.0, -1e4], dtype=dtype, requires_grad=True)
    y = torch.tensor([0.0, -3.0, 0.0, -1e-12], dtype=dtype, requires_grad=True)
    num_targets = torch.tensor([0, 2, 2, 2], dtype=dtype)
    losses = pair_losses(AnswerSums(x, num_targets), AnswerSums(y, num_targets), dpo)
    assert losses.isfinite().all()
    for gradient in torch.autograd.grad(losses.sum(), (x, y)):
        assert gradient.isfinite().all()
