"""Counter-based normal numbers: equal for any slice, normally distributed, and unchanged between versions."""

import hashlib
import math
import random

import pytest
import torch

from weft.core.axes import Box
from weft.models.common.counter_normal import normal_entries

CPU = torch.device("cpu")


def whole(shape: tuple[int, ...], key: int = 7) -> torch.Tensor:
    return normal_entries(key, shape, Box.whole(shape), std=1.0, device=CPU)


@pytest.mark.parametrize("shape", [(), (1,), (70_001,), (3, 40_000), (5, 4, 6), (9_000, 11)])
def test_any_box_equals_the_slice_of_the_whole(shape: tuple[int, ...]):
    values = whole(shape)
    assert tuple(values.shape) == shape
    draws = random.Random(str(shape))
    for _ in range(5):
        low = [draws.randrange(length + 1) for length in shape]
        high = []
        for first, length in zip(low, shape, strict=True):
            high.append(draws.randint(first, length))
        box = Box(tuple(low), tuple(high))
        part = normal_entries(7, shape, box, std=1.0, device=CPU)
        assert torch.equal(part, values[box.slices])


def test_the_standard_deviation_is_one_rounded_multiplication():
    box = Box.whole((4, 33))
    scaled = normal_entries(7, (4, 33), box, std=0.02, device=CPU)
    assert torch.equal(scaled, whole((4, 33)) * torch.tensor(0.02))


ROWS = 1024
COLUMNS = 4096
STANDARD_ERROR = 1 / math.sqrt(ROWS * COLUMNS)
"""Of a mean of 2**22 independent numbers of variance 1."""


@pytest.fixture(scope="module")
def many() -> torch.Tensor:
    """2**22 numbers; bounds on what they estimate are five standard errors."""
    return whole((ROWS, COLUMNS)).double()


@pytest.mark.parametrize(
    ("power", "moment", "variance"), [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]
)
def test_the_moments_are_those_of_a_normal_distribution(many, power, moment, variance):
    """`variance` is that of the power of a standard normal number."""
    if power == 2:
        found = many.var()
    else:
        found = (many**power).mean()
    five_errors = 5 * math.sqrt(variance) * STANDARD_ERROR
    assert abs(found - moment) < five_errors


@pytest.mark.parametrize("distance", [1, 2, 3, 64])
def test_numbers_at_a_distance_are_uncorrelated(many, distance):
    along_rows = many[:, :-distance] * many[:, distance:]
    assert abs(along_rows.mean()) < 5.1 * STANDARD_ERROR
    along_columns = many[:-distance] * many[distance:]
    assert abs(along_columns.mean()) < 5.6 * STANDARD_ERROR


@pytest.mark.parametrize("bound", [1.0, 2.0, 3.0, 4.0])
def test_tails_hold_the_share_of_a_normal_distribution(many, bound):
    is_beyond = many.abs() > bound
    share = is_beyond.double().mean()
    expected = math.erfc(bound / math.sqrt(2))
    five_errors = 5 * math.sqrt(expected) * STANDARD_ERROR
    assert abs(share - expected) < five_errors + 0.02 * expected


def test_means_of_rows_are_independent(many):
    means = many.mean(1) * math.sqrt(COLUMNS)
    difference = abs(means.var() - 1)
    assert difference < 5 * math.sqrt(2 / ROWS)


def test_keys_give_independent_tensors():
    first = whole((64, 1024), key=1).double()
    second = whole((64, 1024), key=2).double()
    products = first * second
    assert abs(products.mean()) < 5 / math.sqrt(first.numel())
    largest_key = 2**64 - 1
    assert whole((4,), key=largest_key).isfinite().all()


def test_the_numbers_stay_what_they_are():
    """Another digest here makes every run of the past start differently."""
    bits = whole((37, 1013), key=2**63 + 12345).numpy().tobytes()
    assert hashlib.sha256(bits).hexdigest()[:16] == "206c17e334222c45"
