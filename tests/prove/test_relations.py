"""Numeric relations of wrong tensors to right ones."""

from __future__ import annotations

import pytest
import torch

from weft.prove.relations import relation

RIGHT = torch.arange(1.0, 13.0).reshape(3, 4).cos()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (RIGHT * 2, "2 times the right values"),
        (RIGHT / 2, "1/2 times the right values"),
        (-RIGHT, "-1 times the right values"),
        (RIGHT * 65536, "65536 times the right values"),
        (RIGHT * 0, "zero"),
        (RIGHT.bfloat16().float(), "rounded to bfloat16"),
        (RIGHT / 0, "not finite"),
        (RIGHT[:2], "of shape [2, 4] in place of [3, 4]"),
        (RIGHT.roll(1, 0), "shifted by +1 along dim 0"),
        (RIGHT.roll(-1, 1), "shifted by -1 along dim 1"),
        (RIGHT[[1, 0, 2]], "the right values in another order (permutation)"),
        (
            RIGHT + torch.eye(3, 4)[[2, 0, 0]] * torch.eye(3)[0][:, None],
            "wrong at 0 of dim 0 (of 3)",
        ),
    ],
)
def test_relation_is_named(wrong, words):
    assert relation(wrong, RIGHT, candidates={}) == words


def test_a_candidate_is_named_before_a_factor():
    candidates = {"the value of step 1 (stale)": RIGHT * 2}
    assert relation(RIGHT * 2, RIGHT, candidates=candidates) == "the value of step 1 (stale)"


def test_rounding_noise_is_no_permutation():
    """Before, lists that differ by rounding alone were close once they were sorted."""
    right = RIGHT.double()
    noise = 1e-8 * torch.randn(RIGHT.shape, dtype=torch.float64)
    assert relation(right * (1 + noise), right, candidates={}) == "different in all entries"


def test_an_update_is_compared_by_its_change():
    before = torch.ones(4)
    right = before - 0.1 * torch.arange(1.0, 5.0)
    twice = before - 0.2 * torch.arange(1.0, 5.0)
    assert (
        relation(twice, right, candidates={}, before=before)
        == "updated by 2 times the right change"
    )
    stale = relation(before, right, candidates={}, before=before)
    assert stale == "not updated: the value of the step before (stale)"
