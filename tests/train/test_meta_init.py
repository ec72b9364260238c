"""Modules on the meta device: real shapes, no random numbers drawn."""

from __future__ import annotations

import pytest
import torch

from weft.models import FAMILIES
from weft.train.init_from import meta_modules


@pytest.mark.parametrize("name", FAMILIES)
def test_a_skeleton_has_the_shapes_of_the_model_and_no_memory(name):
    family = FAMILIES[name]
    bones = torch.nn.ModuleDict(meta_modules(lambda: family.blocks(family.Config())))
    model = torch.nn.ModuleDict(family.blocks(family.Config()))
    expected = {n: p.shape for n, p in model.named_parameters()}
    assert {n: p.shape for n, p in bones.named_parameters()} == expected
    for param in bones.parameters():
        assert param.is_meta


def test_a_skeleton_draws_nothing():
    before = torch.get_rng_state()
    layer = meta_modules(lambda: torch.nn.Linear(3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert layer.weight.shape == (4, 3)


def test_values_are_drawn_again_afterwards():
    meta_modules(lambda: torch.nn.Linear(3, 4))
    weight = torch.full((3, 3), 7.0)
    torch.nn.init.normal_(weight)
    assert not (weight == 7.0).any()
