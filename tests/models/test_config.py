"""Configs of families: rejected fields and the messages."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from weft.core.model_config import check_divides
from weft.models import FAMILIES, PRESETS
from weft.models.deepseek.config import Config as Deepseek
from weft.models.gpt2.config import Config as Gpt2
from weft.models.llama3.config import Config as Llama3
from weft.models.mnist.config import Config as Mnist
from weft.models.qwen3.config import Config as Qwen3
from weft.models.qwen3_moe.config import Config as Qwen3Moe

REFUSED = [
    (Gpt2, {"dim": 130}, "heads", "dim 130 does not divide by heads 4; try dim 128 or 132, or heads 2, 5"),
    (Gpt2, {"heads": 200}, "heads", "dim 128 does not divide by heads 200; try dim 200, or heads 128"),
    (
        Llama3,
        {"heads": 6, "kv_heads": 4, "dim": 96},
        "kv_heads",
        "heads 6 does not divide by kv_heads 4; try heads 4 or 8, or kv_heads 3, 6",
    ),
    (Llama3, {"dim": 20}, "heads", "dim 20 / heads 4 = head size 5, RoPE needs pairs; try dim 40"),
    (
        Llama3,
        {"rope_scaling_low_freq_factor": 8.0},
        "rope_scaling_high_freq_factor",
        "4.0 is not above .* 8.0; try 32.0",
    ),
    (Llama3, {"rope_theta": float("inf")}, "rope_theta", "finite"),
    (Gpt2, {"layers": 0}, "layers", "greater than or equal to 1"),
    (Gpt2, {"layers": "four"}, "layers", "valid integer"),
    (Gpt2, {"depth": 3}, "depth", "not permitted"),
    (
        Mnist,
        {"arch": "conv", "image_size": 30},
        "image_size",
        '30 is not divisible by 4, and arch "conv" halves it twice; try',
    ),
    (Mnist, {"arch": "cnn"}, "arch", "'mlp' or 'conv'"),
    (Qwen3, {"kv_heads": 3}, "kv_heads", "heads 4 does not divide by kv_heads 3; try heads 3 or 6, or kv_heads 2, 4"),
    (Qwen3, {"head_size": 31}, "head_size", "multiple of 2"),
    (Qwen3Moe, {"top_k": 9}, "top_k", "9 of 8 experts; try 8 or less"),
    (Deepseek, {"first_k_dense": 5}, "first_k_dense", "5 of 4 layers; try 4 or less"),
    (
        Deepseek,
        {"n_group": 3},
        "n_group",
        "experts 8 does not divide by n_group 3; try experts 6 or 9, or n_group 2, 4",
    ),
    (Deepseek, {"n_group": 2, "topk_group": 3}, "topk_group", "3 of n_group 2 groups; try 2 or less"),
    (
        Deepseek,
        {"n_group": 4, "top_k": 3},
        "topk_group",
        "1 groups hold 2 experts, top_k is 3; try top_k 2, or topk_group 2",
    ),
    (Deepseek, {"top_k": 9}, "top_k", "9 of 8 experts; try 8 or less"),
    (Deepseek, {"qk_rope_head_dim": 15}, "qk_rope_head_dim", "multiple of 2"),
    (Deepseek, {"mtp_depth": 2}, "mtp_depth", "less than or equal to 1"),
    (
        Deepseek,
        {"rope_scaling_beta_slow": 32.0},
        "rope_scaling_beta_slow",
        "32.0 is not below rope_scaling_beta_fast 32.0; try 1.0",
    ),
]


@pytest.mark.parametrize(("config", "fields", "key", "says"), REFUSED)
def test_a_bad_field_is_rejected_under_its_key_with_values_that_work(config, fields, key, says):
    with pytest.raises(ValidationError, match=says) as refused:
        config(**fields)
    assert [error["loc"] for error in refused.value.errors()] == [(key,)]


def test_all_faults_are_reported_at_once():
    with pytest.raises(ValidationError) as refused:
        Llama3(layers=-1, dim=130, ffn=0, vocab=0)
    assert [error["loc"] for error in refused.value.errors()] == [("layers",), ("heads",), ("vocab",), ("ffn",)]


def test_learned_positions_bound_the_sequence_and_rotary_ones_do_not():
    fault = Gpt2(max_seq_len=64).check_seq_len(65)
    assert str(fault) == (
        "data.seq_len: longer than the positions that the model learns (got 65; need at most model.max_seq_len = 64). "
        "Fix: set model.max_seq_len to 65 or data.seq_len to 64"
    )
    assert Gpt2(max_seq_len=64).check_seq_len(64) is None
    assert Llama3(max_seq_len=64).check_seq_len(65) is None


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name):
    cfg = PRESETS[name]
    assert FAMILIES[cfg.family].Config.model_validate_json(cfg.model_dump_json()) == cfg


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_every_value_that_a_divisibility_fault_proposes_would_work(value: int, parts: int):
    if value % parts == 0:
        return check_divides(value, parts, value_name="dim", parts_name="heads")
    with pytest.raises(ValueError, match="does not divide") as refused:
        check_divides(value, parts, value_name="dim", parts_name="heads")
    values, divisors = re.fullmatch(r".*; try dim (.*), or heads (.*)", str(refused.value)).groups()
    assert all(int(proposed) % parts == 0 for proposed in values.split(" or "))
    assert all(value % int(proposed) == 0 for proposed in divisors.split(", "))
    return None
