"""A token is a function of logits, seed, sample and position, by the probabilities that are asked for."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.errors import WeftError
from weft.generate.sample import Sampling, TokenPosition, sample_token, uniform

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 2.0, 0.5], dtype=torch.float64)
DRAWS = 2_000


def shares(sampling: Sampling) -> Tensor:
    """How often each token of LOGITS is drawn."""
    tokens = [
        sample_token(LOGITS, sampling, TokenPosition(sample, sample % 7)) for sample in range(DRAWS)
    ]
    return torch.bincount(torch.tensor(tokens), minlength=len(LOGITS)) / DRAWS


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(temperature=1.0), (0, 1, 2, 3, 4, 5)),
        (Sampling(temperature=0.5), (0, 1, 2, 3, 4, 5)),
        (Sampling(temperature=1.0, top_k=3), (1, 2, 4)),
        (Sampling(temperature=1.0, top_k=1), (1,)),  # of two likeliest tokens the first
        (
            Sampling(temperature=1.0, top_p=0.5),
            (1, 4),
        ),  # they have 0.35 each: the second crosses a half
        (Sampling(temperature=1.0, top_p=0.01), (1,)),
        (Sampling(temperature=2.0, top_k=4, top_p=0.6), (1, 4)),
    ],
)
def test_tokens_are_sampled_by_probability_among_the_candidates(
    sampling: Sampling, allowed: tuple[int, ...]
):
    barred = torch.full_like(LOGITS, -math.inf)
    right = (
        (LOGITS / sampling.temperature)
        .where(torch.isin(torch.arange(6), torch.tensor(allowed)), barred)
        .softmax(0)
    )
    seen = shares(sampling)
    # four standard deviations of a share: the draws are fixed, so this can fail once and for all or never
    standard_deviation = (right * (1 - right) / DRAWS).sqrt()
    assert torch.all((seen - right).abs() <= 4 * standard_deviation)


@given(st.integers(0, 2**63 - 1), st.integers(0, 1000), st.integers(0, 10**6))
def test_uniform_numbers_depend_on_seed_sample_and_position_alone(
    seed: int, sample: int, position: int
):
    number = uniform(seed, TokenPosition(sample, position))
    assert 0 <= number < 1
    assert number == uniform(seed, TokenPosition(sample, position))
    others = [
        uniform(seed + 1, TokenPosition(sample, position)),
        uniform(seed, TokenPosition(sample + 1, position)),
    ]
    token_position = TokenPosition(sample, position + 1)
    assert number not in (*others, uniform(seed, token_position))


def test_temperature_zero_takes_the_likeliest():
    assert (
        sample_token(
            LOGITS + torch.tensor([0, 0, 0, 0, 1e-9, 0]),
            Sampling(temperature=0),
            TokenPosition(0, 0),
        )
        == 4
    )


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=9),
    st.integers(1, 12),
    st.floats(0.01, 1),
    st.integers(0, 99),
)
def test_a_candidate_is_always_sampled(
    logits: list[float], top_k: int, top_p: float, position: int
):
    values = torch.tensor(logits)
    token = sample_token(
        values, Sampling(temperature=0.7, top_k=top_k, top_p=top_p), TokenPosition(0, position)
    )
    assert 0 <= token < len(logits)
    assert (values > values[token]).sum() < top_k


def test_dtype_and_device_of_logits_do_not_matter():
    exact = torch.tensor([0.0, 1.5, 0.25, -2.0])
    for sample in range(50):
        drawn = {
            sample_token(exact.to(kind), Sampling(), TokenPosition(sample, 3))
            for kind in (torch.float64, torch.float32, torch.bfloat16)
        }
        assert len(drawn) == 1


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_no_token_is_sampled_from_logits_that_are_not_finite(value: float, temperature: float):
    logits = torch.tensor([0.0, value, 1.0], dtype=torch.float16)
    with pytest.raises(WeftError, match=r"sample 2, position 17: the logits are not finite"):
        sample_token(logits, Sampling(temperature), TokenPosition(2, 17))
