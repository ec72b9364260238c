"""Checks of `lora.targets`, `lora.rank` and `lora.quantize`."""

from __future__ import annotations

import pytest

from weft.config.load import load
from weft.config.rules.checks import run_checks
from weft.config.rules.config_checks import config_checks
from weft.models import FAMILIES


def fixes(*words: str) -> list[str]:
    run = load(["--lora.rank", "4", *words], FAMILIES)
    return [fault.fix for fault in run_checks(run, config_checks)]


@pytest.mark.parametrize("name", ["q", "k", "v", "o", "gate", "up", "down"])
def test_names_of_hugging_face_projections_get_a_suggestion(name: str) -> None:
    assert fixes("--lora.targets", f"{name}_proj") == [f"did you mean {name!r}?"]
    assert fixes("--lora.targets", f"layer0.attn.{name}_proj") == [f"did you mean {name!r}?"]


def test_names_of_linears_are_accepted() -> None:
    assert fixes("--lora.targets", "q", "layer1.mlp.*") == []


def test_the_rank_is_at_most_the_smaller_side() -> None:
    assert fixes("--lora.rank", "65", "--lora.targets", "k") == ["--lora.rank 8"]


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (("--lora.rank", "0"), "--lora.rank 8, or --lora.quantize none"),
        (("--model.ffn", "353"), "--lora.quantize none"),
    ],
    ids=["all weights are trained", "odd"],
)
def test_weights_in_4_bits_are_frozen_and_even(words: tuple[str, ...], fix: str) -> None:
    assert fixes("--lora.quantize", "nf4", *words) == [fix]


def test_weights_in_4_bits_are_accepted() -> None:
    assert fixes("--lora.quantize", "nf4", "--mesh", "tp2") == []
    assert fixes("--lora.quantize", "nf4", "--model.name", "hf:phi3", "--mesh", "pp2") == []
