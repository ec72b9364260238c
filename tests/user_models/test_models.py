"""Each of nineteen models under each layout equals one device within 1e-9, or is rejected in one line before the first step."""

from __future__ import annotations

import pytest

from tests.user_models.sweep import LAYOUTS, MODELS, outcome

TOLERANCE = 1e-9
"""Relative, in float64, which rounds at 1e-16."""
ATTEND = "mixes tokens outside of Attend"
IMAGES = "reads images"
ARRAYS = "reads arrays"
OF_ARRAYS = ("encoder_decoder", "diffusion", "unet", "unet_norm")
OUTSIDE = "scaled_dot_product_attention sums over a sharded dim"
REJECTED = {
    ("vit", "tp2 sp"): IMAGES,
    ("vit", "cp2"): IMAGES,
    ("scan", "cp2"): ATTEND,
    ("latents", "tp2 sp"): IMAGES,
    ("latents", "cp2"): IMAGES,
    **{
        (name, layout): IMAGES
        for name in ("batch_norm", "resnet", "mobilenet")
        for layout in ("tp2 sp", "cp2")
    },
    ("head_bias", "cp2"): ATTEND,
    ("shared_router", "tp2 sp"): "topk over a sharded dim",
    ("torch_attention", "tp2 sp"): OUTSIDE,
    ("torch_attention", "cp2"): ATTEND,
    ("torch_encoder", "tp2 sp"): OUTSIDE,
    ("torch_encoder", "cp2"): ATTEND,
    **{(name, layout): ARRAYS for name in OF_ARRAYS for layout in ("tp2 sp", "cp2")},
}
"""(model, layout) -> part of the line."""
EQUAL = [(name, layout) for name in MODELS for layout in LAYOUTS if (name, layout) not in REJECTED]
ALWAYS = (
    ("fused_block", "tp2 sp"),
    ("head_bias", "tp2 sp"),
    ("shared_layer", "tp2"),
    ("torch_attention", "dp2 zero3"),
    ("dropout", "cp2"),
    ("dropout", "tp2 sp"),
    ("encoder_decoder", "pp2"),
    ("encoder_decoder", "tp2"),
    ("diffusion", "dp2 zero3"),
    ("unet", "pp2"),
    ("unet_norm", "dp2 zero3"),
    ("batch_norm", "tp2"),
    ("resnet", "pp2"),
    ("frozen_norm", "pp2"),
    ("mobilenet", "dp2 zero3"),
)
"""Cases that run by default; `make slow` runs all."""


def compare(name: str, layout: str, *, steps: int) -> None:
    found = outcome(name, layout, steps=steps)
    assert isinstance(found, float), found
    assert found <= TOLERANCE


@pytest.mark.parametrize(("name", "layout"), ALWAYS)
def test_some_models_equal_one_device_after_one_step(name: str, layout: str) -> None:
    compare(name, layout, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), EQUAL)
def test_every_model_equals_one_device(name: str, layout: str) -> None:
    compare(name, layout, steps=3)


def test_a_bias_before_batch_norm_whose_gradient_is_rounding_is_no_false_alarm() -> None:
    found = outcome("bias_before_norm", "pp2", steps=2)
    assert isinstance(found, float), found
    assert TOLERANCE < found < 1e-6


@pytest.mark.parametrize(("name", "layout"), REJECTED)
def test_a_model_is_rejected_in_one_line(name: str, layout: str) -> None:
    found = outcome(name, layout, steps=1)
    assert isinstance(found, str), found
    assert REJECTED[name, layout] in found
    assert "\n" not in found
