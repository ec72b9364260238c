"""Policies of recomputation: their text, the modes of layers, and the stages that they fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.matrix.layouts import Case
from weft.errors import PlanError
from weft.layout.explain import explain
from weft.layout.recomputation import (
    AUTO,
    MODES,
    RecomputeMode,
    RecomputePolicy,
    known_policy,
    read_key,
    read_policy,
)

OF_STAGES = st.lists(st.lists(st.sampled_from(MODES), max_size=9), min_size=1, max_size=5)


@given(OF_STAGES)
def test_the_text_of_a_policy_gives_every_layer_its_mode(modes: list[list[RecomputeMode]]) -> None:
    policy = RecomputePolicy.of_modes(modes)
    again = read_policy(policy.text)
    assert again == policy
    for stage, of_stage in enumerate(modes):
        assert again.of_layers(stage, len(of_stage)) == tuple(of_stage)
    assert again.modes >= {mode for of_stage in modes for mode in of_stage}


@pytest.mark.parametrize(
    ("text", "modes"),
    [
        ("full", "full full full full"),
        ("full:3", "full full full none"),
        ("full:1+selective", "full selective selective selective"),
        ("full:1+selective:2", "full selective selective none"),
        ("full:12", "full full full full"),
        ("none:1+full", "none full full full"),
    ],
)
def test_layers_are_counted_from_the_first_one(text: str, modes: str) -> None:
    assert read_policy(text).of_layers(2, 4) == tuple(modes.split())


@pytest.mark.parametrize(
    "text", ["", "all", "full:0", "full:-1", "full+none", "full:2+", "/", "full:1000000000", "auto:", "auto:auto"]
)  # fmt: skip
def test_other_texts_are_no_policy(text: str) -> None:
    with pytest.raises(ValueError, match=r"no mode of layers|layers follow"):
        read_key(text)


def test_a_policy_names_the_stages_of_the_layout() -> None:
    plan = Case("pp2", layers=2, recompute="full/none").plan
    plan.check()
    modes = plan.recompute_of
    assert [modes[name] for name in plan.stages[0].blocks] == ["none", "full"]  # the embedding
    assert set(map(modes.__getitem__, plan.stages[1].blocks)) == {"none"}
    assert "  stage 0: 1 full\n  stage 1: 1 none" in explain(plan)
    with pytest.raises(PlanError, match="got 3 policies; need one policy for all"):
        plan.model_copy(update={"recompute": "full/none/none"}).check()


def test_blocks_that_are_left_out_change_no_other_mode() -> None:
    plan = Case("pp2", layers=8, recompute="full:2+selective/none").plan
    kept = [[name for name in stage.blocks if name != "layer0"] for stage in plan.stages]
    shorter = plan.with_blocks(kept)
    assert shorter.recompute_of == {
        name: plan.recompute_of[name] for names in kept for name in names
    }


def test_a_recorded_choice_for_other_stages_is_made_anew() -> None:
    assert known_policy(AUTO, 2) is None
    assert known_policy("auto:full/none", 4) is None
    assert known_policy("auto:full/none", 2) == read_policy("full/none")
    assert known_policy("full/none", 4) == read_policy("full/none")  # given: a fault
