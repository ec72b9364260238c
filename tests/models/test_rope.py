"""Angles of rotary embeddings are computed once a micro-batch, and live no longer than its positions."""

from __future__ import annotations

import copy
import gc

import pytest
import torch

from weft.models.common.rope import Rope, SharedAngles, share_angles

POSITIONS = torch.arange(6).repeat(2, 1)


def ropes(*thetas: float) -> list[Rope]:
    made = [Rope(8, theta=theta) for theta in thetas]
    share_angles(made)
    return made


def test_layers_that_rotate_alike_have_the_same_angles_to_the_bit():
    first, second, other = ropes(100.0, 100.0, 7.0)
    positions = POSITIONS.clone()
    angles = first(positions)
    assert second(positions) is angles
    for got, want in zip(angles, Rope(8, theta=100.0)(positions), strict=True):
        assert torch.equal(got, want)
    assert not torch.equal(other(positions)[0], angles[0])
    assert first(positions) is angles  # each kind has its own


def test_other_positions_and_changed_ones_are_computed_anew():
    rope, second = ropes(100.0, 100.0)
    positions = POSITIONS.clone()
    before = rope(positions)
    others = POSITIONS.clone()
    assert second(others) is not before
    changed = rope(positions)
    positions += 1
    assert rope(positions) is not changed
    assert torch.equal(rope(positions)[0], Rope(8, theta=100.0)(POSITIONS + 1)[0])


def test_angles_are_dropped_with_their_positions():
    rope, *_ = ropes(100.0, 100.0)
    positions = POSITIONS.clone()
    rope(positions)
    assert isinstance(rope.shared, SharedAngles)
    assert len(rope.shared) == 1
    del positions
    gc.collect()
    assert len(rope.shared) == 0
    assert len(copy.deepcopy(rope).shared) == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_angles_of_inference_serve_no_backward(is_first):
    (rope,) = ropes(100.0)
    positions = POSITIONS.clone()
    if is_first:
        with torch.inference_mode():
            rope(positions)
    cos, _ = rope(positions)
    x = torch.ones_like(cos, requires_grad=True)
    (x * cos).sum().backward()
    assert torch.equal(x.grad, cos)
