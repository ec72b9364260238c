"""Text written with a cache is the text of a model that reads everything anew for each token, on one rank and on many."""

from __future__ import annotations

import pytest

from tests.generate.models import CONFIGS, DRAWN, GREEDY, Grow, config_of, on_ranks, worst

SAME = 1e-9
"""Relative to the largest logit, in float64: some 1e2 operations that round at 1e-16 each."""

SAMPLINGS = {"greedy": GREEDY, "drawn": DRAWN}
LAYOUTS = [
    ("llama3", "tp2"), ("llama3", "tp4"), ("llama3", "pp3"), ("llama3", "pp2 tp2"),
    ("gpt2", "pp2 tp2"), ("qwen3", "pp2 tp2"),
    ("qwen3-moe", "ep2"), ("qwen3-moe", "tp2 ep4"), ("qwen3-moe", "pp2 ep2"),
    ("deepseek", "ep2"), ("deepseek", "pp3 tp2"), ("deepseek", "pp2 ep2 tp2"),
]  # fmt: skip


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("family", CONFIGS)
def test_cached_equals_reading_everything_anew(family: str, sampling: str):
    check(family, "", Grow(sampling=SAMPLINGS[sampling]))


@pytest.mark.parametrize(("family", "mesh"), LAYOUTS)
def test_every_layout_writes_what_one_device_writes(family: str, mesh: str):
    check(family, mesh, Grow(num_tokens=5, sampling=DRAWN))


def test_one_row_on_two_expert_ranks_leaves_one_of_them_empty():
    check("qwen3-moe", "ep2", Grow(prompts=((4, 5, 6),), num_tokens=4))
    check("deepseek", "pp2 ep2", Grow(prompts=((4, 5, 6),), num_tokens=4))


def check(family: str, mesh: str, grow: Grow) -> None:
    """Token for token, and logit for logit, on every rank."""
    config = config_of(family)
    texts, logits = grow.truth(config)
    seen = set()
    for ours, held in on_ranks(config, mesh, grow):
        assert ours == texts
        assert worst(held, logits) < SAME if held else True
        seen |= set(held)
    assert seen == set(logits), "some rank has drawn each row"
