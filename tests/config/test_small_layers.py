"""Fewer layers keep every kind of layer, and what patterns and stages name."""

from __future__ import annotations

import shlex

import pytest

from weft.config.load import load
from weft.config.lora import matches
from weft.config.run import Run, plan_of
from weft.config.small_layers import layer_kinds
from weft.config.small_runs import reduced
from weft.models import FAMILIES


def reduced_run(words: str) -> Run:
    return reduced(load(shlex.split(words), FAMILIES), lambda *_: True)


@pytest.mark.parametrize(
    "words",
    [
        "--mesh cp2 --model.preset gemma3-1b",
        '--mesh "pp2 ep2" --model.name deepseek --model.layers 8 --model.first_k_dense 2',
        "--mesh pp4 --model.preset deepseek-v3-671b",
        "--mesh dp2 --model.preset llama3-8b",
        "--mesh dp2 --model.name deepseek --model.layers 8 --model.first_k_dense 8",
    ],
)
def test_every_kind_of_layer_remains(words: str) -> None:
    run = load(shlex.split(words), FAMILIES)
    small = reduced_run(words)
    before = layer_kinds(run.model, run.data.seq_len)
    after = layer_kinds(small.model, small.data.seq_len)
    assert 3 <= len(after) < len(before)
    assert len(set(after)) == len(set(before))


def test_patterns_that_name_layers_name_those_that_stand_for_them() -> None:
    small = reduced_run(
        "--mesh dp2 --model.preset llama3-8b --lora.rank 4 --lora.targets layer30.attn.q v "
        "--optim.groups 'layer2.*: lr_scale=0.1' '*layer1[0-9].attn*: lr_scale=2' '*norm*: weight_decay=0'"
    )
    linears = small.model.linears()
    patterns = [group.match for group in small.optim.groups]
    named = [{name.partition(".")[0] for name in linears if matches(p, name)} for p in patterns]
    assert [len(layers) for layers in named] == [1, 1, 0], patterns
    assert len(set().union(*named)) == 2, "settings of two different layers"
    assert patterns[2] == "*norm*"
    own_target, every_layer = small.lora.targets
    assert every_layer == "v"
    assert sum(matches(own_target, name) for name in linears) == 1


def test_a_group_of_expert_layers_stays_one_of_expert_layers() -> None:
    small = reduced_run(
        "--mesh dp2 --model.preset deepseek-v3-671b "
        "--optim.groups 'layer1.*: lr_scale=0.5' 'layer7.*: lr_scale=0.1'"
    )
    kinds = layer_kinds(small.model, small.data.seq_len)
    matches_of_groups = [group.match for group in small.optim.groups]
    dense, mixed = (
        int(each.removeprefix("layer").removesuffix(".*")) for each in matches_of_groups
    )
    assert kinds[dense] == kinds[0]
    assert kinds[mixed] == kinds[-1] != kinds[0]


def test_explicit_stages_keep_their_proportions() -> None:
    small = reduced_run("--mesh pp2 --model.preset gpt2-124m --pipeline.split 3 9")
    assert small.model.architecture["layers"] == 3
    assert small.pipeline.split == (1, 2)
    empty = reduced_run("--mesh pp4 --model.preset gpt2-124m --pipeline.split 0 6 6 0")
    assert empty.pipeline.split[0] == empty.pipeline.split[3] == 0
    assert len(plan_of(empty).stages) == 4


@pytest.mark.parametrize(("tp", "vocab"), [(2, 50_257), (4, 50_257), (3, 128_256), (8, 50_304)])
def test_a_vocabulary_that_tp_does_not_divide_stays_one(tp: int, vocab: int) -> None:
    sizes = f"--model.name llama3 --model.heads 24 --model.kv_heads 24 --model.dim 768 --model.vocab {vocab}"
    small = reduced_run(f"--mesh tp{tp} {sizes}")
    own = small.model.architecture["vocab"]
    assert own < 300
    assert own % tp == vocab % tp


def test_fewer_experts_are_visited_than_there_are() -> None:
    sizes = reduced_run("--mesh ep2 --model.preset qwen3-moe-30b-a3b").model.architecture
    assert sizes["top_k"] < sizes["experts"] <= 8


def test_scaled_rotary_embeddings_scale_in_short_sequences() -> None:
    run = load(["--model.preset", "llama3-8b", "--data.seq_len", "8192"], FAMILIES)
    small = reduced(run, lambda *_: True)
    ratio = run.data.seq_len // small.data.seq_len
    sizes = small.model.architecture
    assert sizes["rope_scaling_factor"] == 8.0
    assert sizes["rope_scaling_original_context"] == 8192 // ratio
