"""Runs made from runs: reduced sizes, smaller cases, and the keys that differ."""

from __future__ import annotations

import shlex

import pytest

from weft.config.changed_runs import changes, with_degree
from weft.config.load import load
from weft.config.run import Run
from weft.config.small_runs import reduced
from weft.config.smaller_cases import reductions
from weft.models import FAMILIES


def run_of(words: str) -> Run:
    return load(shlex.split(words), FAMILIES)


def test_a_model_that_takes_no_other_sizes_keeps_its_own() -> None:
    run = run_of("--mesh tp2 --model.layers 5")
    smaller = reduced(run, lambda model, _: model.architecture["layers"] >= 5)
    assert smaller.model == run.model
    assert smaller.steps < run.steps
    assert reduced(run, lambda *_: True).model.architecture["layers"] == 3


def test_another_degree_keeps_the_number_of_micro_batches() -> None:
    run = run_of("--mesh 'dp4 tp2' --batch.global_size 16 --batch.micro_size 2")
    smaller = with_degree(run, "dp", 1)
    assert smaller.mesh == "tp2"
    assert smaller.num_micro == run.num_micro
    assert changes(run, smaller) == {"mesh": ("dp4 tp2", "tp2"), "batch.global_size": ("16", "4")}


def test_every_reduction_makes_another_run_the_smallest_first() -> None:
    run = run_of("--mesh 'dp4 tp2' --model.layers 3 --parallel.zero 1")
    found = []
    for reduction in reductions(run, lambda *_: True):
        for smaller in reduction(run):
            assert smaller != run
            found.append(smaller)
    assert [each.mesh for each in found[:3]] == ["tp2", "dp2 tp2", "dp4"]
    assert 0 in [each.parallel.zero for each in found]
    assert 1 in [each.model.architecture["layers"] for each in found]


@pytest.mark.parametrize(
    ("words", "heads", "kv_heads"),
    [
        ("--model.preset llama3-8b --mesh dp2", 4, 2),
        ("--model.preset llama3-8b --mesh tp2", 8, 4),
        ("--model.preset llama3-8b --mesh 'cp2 tp2' --parallel.context ulysses", 16, 8),
        ("--model.preset gpt2-124m --mesh cp2 --parallel.context ulysses", 4, None),
        ("--model.preset gemma3-1b --mesh dp2", 2, 1),
    ],
)
def test_a_rank_keeps_two_heads_whose_order_matters(
    words: str, heads: int, kv_heads: int | None
) -> None:
    sizes = reduced(run_of(words), lambda *_: True).model.architecture
    assert (sizes["heads"], sizes.get("kv_heads")) == (heads, kv_heads)


def test_a_smaller_vocabulary_has_a_padding_token_that_its_data_has() -> None:
    run = run_of("--model.preset llama3-8b --model.padding_id -2 --mesh tp2")
    sizes = reduced(run, lambda *_: True).model.architecture
    assert (sizes["vocab"], sizes["padding_id"]) == (256, (128_256 - 2) % 256)


def test_an_expert_may_have_more_than_twice_the_mean_of_tokens() -> None:
    run = run_of("--model.preset qwen3-moe-30b-a3b --mesh ep2")
    sizes = reduced(run, lambda *_: True).model.architecture
    assert sizes["experts"] >= 4 * sizes["top_k"]
