"""Configs of families: rejected fields and the messages."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.small_models import TEXT_FAMILIES, small_config, small_fields
from weft.core.model_config import check_divides
from weft.models import FAMILIES, PRESETS
from weft.models.deepseek.config import Config as Deepseek
from weft.models.gpt2.config import Config as Gpt2
from weft.models.llama3.config import Config as Llama3
from weft.models.mnist.config import Config as Mnist
from weft.models.qwen3.config import Config as Qwen3
from weft.models.qwen3_moe.config import Config as Qwen3Moe

REFUSED = [
    (
        Gpt2,
        {"dim": 130},
        "heads",
        "dim 130 does not divide by heads 4; try dim 128 or 132, or heads 2, 5",
    ),
    (
        Gpt2,
        {"heads": 200},
        "heads",
        "dim 128 does not divide by heads 200; try dim 200, or heads 128",
    ),
    (
        Llama3,
        {"heads": 6, "kv_heads": 4, "dim": 96},
        "kv_heads",
        "heads 6 does not divide by kv_heads 4; try heads 4 or 8, or kv_heads 3, 6",
    ),
    (
        Llama3,
        {"padding_id": 256},
        "padding_id",
        "256 is not in the vocabulary of 256; try 0 to 255",
    ),
    (Deepseek, {"padding_id": -257}, "padding_id", "-257 is not in the vocabulary of 256"),
    (Llama3, {"dim": 7}, "heads", "dim 7 does not divide by heads 4; try dim 8 .type"),
    (Llama3, {"dim": 90}, "heads", "try dim 88 or 96, or heads 3, 5"),
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
    (
        Qwen3,
        {"kv_heads": 3},
        "kv_heads",
        "heads 4 does not divide by kv_heads 3; try heads 3 or 6, or kv_heads 2, 4",
    ),
    (Qwen3, {"head_size": 31}, "head_size", "multiple of 2"),
    (Qwen3Moe, {"top_k": 9}, "top_k", "9 of 8 experts; try 8 or less"),
    (Deepseek, {"first_k_dense": 5}, "first_k_dense", "5 of 4 layers; try 4 or less"),
    (
        Deepseek,
        {"n_group": 3},
        "n_group",
        "experts 8 does not divide by n_group 3; try experts 6 or 9, or n_group 2, 4",
    ),
    (
        Deepseek,
        {"n_group": 2, "topk_group": 3},
        "topk_group",
        "3 of n_group 2 groups; try 2 or less",
    ),
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
    with pytest.raises(ValidationError, match=says) as rejected:
        config(**fields)
    assert [error["loc"] for error in rejected.value.errors()] == [(key,)]


def test_all_faults_are_reported_at_once():
    with pytest.raises(ValidationError) as rejected:
        Llama3(layers=-1, dim=130, ffn=0, vocab=0)
    assert [error["loc"] for error in rejected.value.errors()] == [
        ("layers",),
        ("heads",),
        ("vocab",),
        ("ffn",),
    ]


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


@given(st.integers(1, 2_000), st.integers(1, 300))
def test_every_size_that_a_fault_of_heads_proposes_is_accepted(dim: int, heads: int):
    """Before, `dim 7 does not divide by heads 4; try dim 4` led to the next fault."""
    try:
        Llama3(dim=dim, heads=heads, kv_heads=1)
    except ValidationError as rejected:
        proposed = re.search(r"try dim ([\d or]+)(?:, or heads ([\d, ]+))?", str(rejected))
        dims, divisors = proposed.groups()
        for size in dims.strip().split(" or "):
            Llama3(dim=int(size), heads=heads, kv_heads=1)
        for count in (divisors or "").split(", "):
            if count.strip():
                Llama3(dim=dim, heads=int(count), kv_heads=1)


@given(st.integers(1, 10_000), st.integers(1, 10_000))
def test_every_value_that_a_divisibility_fault_proposes_would_work(value: int, parts: int):
    if value % parts == 0:
        return check_divides(value, parts, value_name="dim", parts_name="heads")
    with pytest.raises(ValueError, match="does not divide") as rejected:
        check_divides(value, parts, value_name="dim", parts_name="heads")
    values, divisors = re.fullmatch(
        r".*; try dim (.*), or heads (.*)", str(rejected.value)
    ).groups()
    for proposed in values.split(" or "):
        assert int(proposed) % parts == 0
    for proposed in divisors.split(", "):
        assert value % int(proposed) == 0
    return None


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_every_family_ships_a_tiny_preset_of_its_defaults(family: str):
    assert PRESETS[f"{family}-tiny"] == FAMILIES[family].Config()


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_every_family_rejects_sizes_below_one_under_their_own_key(family: str):
    fields = small_fields(family)
    for name in ("layers", "dim", "heads", "vocab"):
        with pytest.raises(ValidationError) as rejected:
            FAMILIES[family].Config(**{**fields, name: 0})
        assert (name,) in [error["loc"] for error in rejected.value.errors()]


@pytest.mark.parametrize(
    "family", [name for name in TEXT_FAMILIES if "kv_heads" in FAMILIES[name].Config.model_fields]
)
def test_every_family_rejects_key_value_heads_that_do_not_divide_heads(family: str):
    with pytest.raises(ValidationError, match="heads 4 does not divide by kv_heads 3"):
        FAMILIES[family].Config(**small_fields(family, kv_heads=3))


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_every_family_counts_the_units_of_each_axis_that_can_be_sharded(family: str):
    """An axis of AXES without units is never sharded; one with units is in AXES."""
    cfg = small_config(family)
    axes = {axis for row in FAMILIES[family].AXES.values() for axis in row}
    assert set(cfg.axis_sizes()) <= axes
    for size in cfg.axis_sizes().values():
        assert size >= 1


def test_a_window_hides_keys_from_some_layers_only():
    gemma3 = small_config("gemma3")
    assert [gemma3.window_of(layer) for layer in range(4)] == [5, None, 5, None]
    assert small_config("mistral").window_of(0) == 5
    assert small_config("mistral", window=0).window_of(0) is None
