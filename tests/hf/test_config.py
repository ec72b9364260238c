"""config.json both ways: fields, rejected keys, contradictions between folder and flags. No torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weft.config.hf import read_config
from weft.config.hf.read_config import (
    DescribedModel,
    config_faults,
    describe_folder,
    find_family,
    uncomputed_settings,
)
from weft.config.hf.write_config import config_json, unwritable
from weft.config.load import try_load
from weft.config.toml import dump
from weft.errors import CheckpointError
from weft.models import FAMILIES, PRESETS

COUNTERPARTS = {
    name: config for name, config in PRESETS.items() if not list(unwritable(config, FAMILIES))
}

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}
QWEN3_MOE = {
    **LLAMA,
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "intermediate_size": 1,
}
DEEPSEEK = {
    **LLAMA,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 16,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
GEMMA3 = {
    **LLAMA,
    "architectures": ["Gemma3ForCausalLM"],
    "sliding_window": 8,
    "sliding_window_pattern": 2,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 4,
    "vocab_size": 256,
}

REFUSED = {
    "rope of a type that is not there": (
        LLAMA,
        {"rope_scaling": {"type": "longrope", "factor": 2.0}},
        "'longrope'",
    ),
    "rope that DeepSeek does not scale so": (
        DEEPSEEK,
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "'linear'",
    ),
    "rope of a context that is not there": (
        QWEN3_MOE,
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}},
        "rope: yarn without original_max_position_embeddings",
    ),
    "rope without the factor that it scales by": (
        LLAMA,
        {"rope_scaling": {"rope_type": "linear"}},
        "rope: linear without factor",
    ),
    "rope whose long waves are short ones": (
        QWEN3_MOE,
        {
            "max_position_embeddings": 64,
            "rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 5.0},
        },
        "rope: high is not above low",
    ),
    "rope of Gemma 3 in a table of all layers": (
        GEMMA3,
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e3}},
        "transformers does not read these settings of Gemma 3 there",
    ),
    "rope of Gemma 3 by its old name": (
        GEMMA3,
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "transformers does not read these settings of Gemma 3 there",
    ),
    "rope of a part of a head": (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "rope with a key more": (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "bend": 1.0}},
        "rope: bend",
    ),
    "rope that is no table": (LLAMA, {"rope_scaling": "llama3"}, "rope_scaling is no table"),
    "rope with a word": (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", "factor": "8"}},
        "rope: factor is no number",
    ),
    "rope without the length that it scales": (
        LLAMA,
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        "rope: llama3 without original_max_position_embeddings",
    ),
    "yarn without the length that it scales": (
        DEEPSEEK,
        {"rope_scaling": {"type": "yarn", "factor": 40}},
        "rope: yarn without original_max_position_embeddings",
    ),
    "rope of a length of nothing": (
        DEEPSEEK,
        {
            "max_position_embeddings": 64,
            "rope_scaling": {"type": "yarn", "original_max_position_embeddings": 0},
        },
        "original_max_position_embeddings: out of range",
    ),
    "yarn with its own gain": (
        DEEPSEEK,
        {"rope_scaling": {"type": "yarn", "factor": 40, "attention_factor": 1.2}},
        "attention_factor",
    ),
    "yarn with a ramp between features": (
        DEEPSEEK,
        {"rope_scaling": {"type": "yarn", "factor": 40, "truncate": False}},
        "truncate",
    ),
    "yarn with half its mscales": (
        DEEPSEEK,
        {"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}},
        "mscale_all_dim without mscale",
    ),
    "pairs of halves in DeepSeek": (DEEPSEEK, {"rope_interleave": False}, "rope_interleave"),
    "attention with biases": (LLAMA, {"attention_bias": True}, "attention_bias"),
    "feed-forward with biases": (LLAMA, {"mlp_bias": True}, "mlp_bias"),
    "another activation": (
        LLAMA,
        {"hidden_act": "gelu"},
        'hidden_act: not what weft computes (got "gelu"; need "silu"',
    ),
    "another activation in GPT-2": (GPT2, {"activation_function": "relu"}, "activation_function"),
    "heads that do not fill LLaMA's width": (
        LLAMA,
        {"head_dim": 32},
        "head_dim: not what weft computes (got 32; need 16",
    ),
    "layers of two kinds in another order": (
        GEMMA3,
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "a pattern of windows that is no number": (
        GEMMA3,
        {"sliding_window_pattern": [1, 2]},
        "sliding_window_pattern is no number",
    ),
    "layers of no kind": (
        GEMMA3,
        {"sliding_window_pattern": None, "layer_types": 3},
        "layer_types: not what weft computes (got 3",
    ),
    "rope parameters that are a number": (
        GEMMA3,
        {"rope_parameters": 3},
        "rope_parameters is no table",
    ),
    "capped logits": (GEMMA3, {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
    "scaled rope in layers with a window": (
        GEMMA3,
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "linear", "factor": 8.0},
            }
        },
        "'linear'",
    ),
    "a window": (
        QWEN3_MOE,
        {"use_sliding_window": True, "sliding_window": 8},
        "use_sliding_window",
    ),
    "layers with a window": (
        QWEN3_MOE,
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "layers without experts": (QWEN3_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers"),
    "every other layer with experts": (
        QWEN3_MOE,
        {"decoder_sparse_step": 2},
        "decoder_sparse_step",
    ),
    "softmax scores in DeepSeek": (DEEPSEEK, {"scoring_func": "softmax"}, "scoring_func"),
    "another choice of experts": (DEEPSEEK, {"topk_method": "greedy"}, "topk_method"),
    "every other layer mixed": (DEEPSEEK, {"moe_layer_freq": 2}, "moe_layer_freq"),
    "fewer heads of keys in DeepSeek": (
        DEEPSEEK,
        {"num_key_value_heads": 2},
        "num_key_value_heads",
    ),
    "a tied DeepSeek": (DEEPSEEK, {"tie_word_embeddings": True}, "tie_word_embeddings"),
    "an untied GPT-2": (GPT2, {"tie_word_embeddings": False}, "tie_word_embeddings"),
    "scores by layer": (
        GPT2,
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx",
    ),
    "scores as they come": (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
    "cross attention": (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    "quantized weights": (
        DEEPSEEK,
        {"quantization_config": {"quant_method": "fp8"}},
        "quantization_config",
    ),
    "an unknown key": (LLAMA, {"logit_softcap": 30.0}, "logit_softcap: unknown key"),
    "a size that is missing": (LLAMA, {"hidden_size": None}, "has no hidden_size"),
    "a size that is a word": (LLAMA, {"hidden_size": "64"}, "hidden_size is no number"),
}

LONGROPE = {
    "type": "longrope",
    "long_factor": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    "short_factor": [1.0] * 8,
    "original_max_position_embeddings": 32,
}
OTHER_CODE = {
    "longrope": ({**LLAMA, "model_type": "llama"}, {"rope_scaling": LONGROPE}, "'longrope'"),
    "biases": ({**LLAMA, "model_type": "llama"}, {"attention_bias": True}, "attention_bias"),
    "gelu": ({**LLAMA, "model_type": "llama"}, {"hidden_act": "gelu"}, "hidden_act"),
    "wider heads": ({**LLAMA, "model_type": "llama"}, {"head_dim": 32}, "head_dim"),
    "layers without experts": (
        {**QWEN3_MOE, "model_type": "qwen3_moe"},
        {"mlp_only_layers": [0]},
        "mlp_only_layers",
    ),
    "capped logits": (
        {**GEMMA3, "model_type": "gemma3_text"},
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping",
    ),
    "scores by layer": (
        {**GPT2, "model_type": "gpt2"},
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx",
    ),
}
IGNORED_BY_TRANSFORMERS = {
    "a window of Llama": ({**LLAMA, "model_type": "llama"}, {"sliding_window": 8}),
    "softmax scores": ({**DEEPSEEK, "model_type": "deepseek_v3"}, {"scoring_func": "softmax"}),
    "a part of a head": ({**LLAMA, "model_type": "llama"}, {"partial_rotary_factor": 0.5}),
    "an unknown type of rope": (
        {**LLAMA, "model_type": "llama"},
        {"rope_scaling": {"type": "bend"}},
    ),
    "a biased model with a damaged size": (
        {**LLAMA, "model_type": "llama"},
        {"attention_bias": True, "hidden_size": "wide"},
    ),
    "quantized weights": (
        {**LLAMA, "model_type": "llama"},
        {"attention_bias": True, "quantization_config": {"quant_method": "fp8"}},
    ),
}
"""Which transformers' own code does not compute either."""


def folder_with(path: Path, config: dict[str, Any]) -> Path:
    """A folder whose config.json says so, with no tensors."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    header = b"{}"
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def described(folder: Path) -> DescribedModel:
    return describe_folder(folder, FAMILIES)


@pytest.mark.parametrize("name", COUNTERPARTS)
def test_config_of_each_preset_comes_back_as_it_was(tmp_path: Path, name: str):
    config = COUNTERPARTS[name]
    mapping = FAMILIES[config.family].hf
    written = json.loads(json.dumps(config_json(mapping, config, dtype="bfloat16")))
    assert find_family(written, FAMILIES, key="config.json") == (FAMILIES[config.family], mapping)
    assert not list(config_faults(written, mapping.config, key="config.json"))
    found = described(folder_with(tmp_path, written))
    assert found.family == config.family
    fields = found.fields | found.suggested
    assert type(config)(**fields) == config.model_copy(
        update={
            name: getattr(type(config)(**fields), name)
            for name in set(type(config).model_fields) - set(fields)
        }
    )
    training_only = {"balance_loss", "balance_rate", "mtp_loss", "dropout", "labels"}
    scaling = {name for name in type(config).model_fields if name.startswith("rope_scaling")}
    assert set(type(config).model_fields) - set(fields) <= training_only | scaling, (
        "the folder decides all others"
    )


LLAMA3_ROPE = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "gpt2-124m": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "attn_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "resid_pdrop": 0.1,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05,
        "n_ctx": 1024,
        "n_embd": 768,
        "n_head": 12,
        "n_layer": 12,
        "n_positions": 1024,
        "summary_activation": None,
        "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True,
        "summary_type": "cls_index",
        "summary_use_proj": True,
        "vocab_size": 50257,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    },
    "llama3-1b": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 64,
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
        "hidden_act": "silu",
        "mlp_bias": False,
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 8192,
        "model_type": "llama",
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "pretraining_tp": 1,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": LLAMA3_ROPE,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 128256,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": 128,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "qwen3-moe-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rope_scaling": None,
        "rope_theta": 1e6,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "mistral-7b": {
        "architectures": ["MistralForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "initializer_range": 0.02,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": 32000,
    },
    "qwen2-0.5b": {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "hidden_act": "silu",
        "hidden_size": 896,
        "initializer_range": 0.02,
        "intermediate_size": 4864,
        "max_position_embeddings": 131072,
        "max_window_layers": 24,
        "model_type": "qwen2",
        "num_attention_heads": 14,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_logit_softcapping": None,
        "bos_token_id": 2,
        "cache_implementation": "hybrid",
        "eos_token_id": 1,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "initializer_range": 0.02,
        "intermediate_size": 6912,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 26,
        "num_key_value_heads": 1,
        "pad_token_id": 0,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "vocab_size": 262144,
    },
    "deepseek-v3-671b": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "ep_size": 1,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "first_k_dense_replace": 3,
        "hidden_act": "silu",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "model_type": "deepseek_v3",
        "moe_layer_freq": 1,
        "moe_intermediate_size": 2048,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
        "vocab_size": 129280,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 40,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096,
            "type": "yarn",
        },
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_the_presets(tmp_path: Path, name: str):
    preset = PRESETS[name]
    found = described(folder_with(tmp_path, PUBLISHED[name]))
    assert found.family == preset.family
    actual = type(preset)(**{**preset.model_dump(), **found.fields, **found.suggested})
    assert actual == preset


@pytest.mark.parametrize("name", REFUSED)
def test_keys_that_weft_computes_differently_are_rejected_by_name(tmp_path: Path, name: str):
    base, change, message = REFUSED[name]
    folder = folder_with(tmp_path, {**base, **change})
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        described(folder)
    assert len(caught.value.faults) == 1
    described(folder_with(tmp_path, base))


@pytest.mark.parametrize("name", OTHER_CODE)
def test_what_a_family_does_not_compute_is_trained_by_transformers_own_code(
    tmp_path: Path, name: str
) -> None:
    pytest.importorskip("transformers")
    base, change, setting = OTHER_CODE[name]
    config = {**base, **change}
    found = described(folder_with(tmp_path, config))
    assert found.family == f"hf:{base['model_type']}"
    (said,) = uncomputed_settings(config, FAMILIES)
    assert setting in said


@pytest.mark.parametrize("name", OTHER_CODE)
def test_without_transformers_the_setting_is_rejected_with_the_package(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, change, setting = OTHER_CODE[name]
    monkeypatch.setattr(read_config, "architectures", dict)
    with pytest.raises(CheckpointError, match=re.escape(setting)) as caught:
        described(folder_with(tmp_path, {**base, **change}))
    (fault,) = caught.value.faults
    assert fault.fix == "pip install 'weft-train[hf]', whose own code may train it"


@pytest.mark.parametrize("name", IGNORED_BY_TRANSFORMERS)
def test_what_transformers_ignores_is_rejected(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    base, change = IGNORED_BY_TRANSFORMERS[name]
    assert described(folder_with(tmp_path, base))
    with pytest.raises(CheckpointError):
        described(folder_with(tmp_path, {**base, **change}))


def test_a_key_of_the_wrong_kind_is_reported_with_all_others(tmp_path: Path):
    folder = folder_with(tmp_path, {**LLAMA, "mlp_bias": True, "head_dim": 32, "unheard_of": 1})
    with pytest.raises(CheckpointError) as caught:
        described(folder)
    assert [fault.what.partition(":")[0] for fault in caught.value.faults] == [
        "head_dim",
        "mlp_bias",
        "unheard_of",
    ]


def test_keys_that_change_no_logit_pass(tmp_path: Path):
    more = {
        "_name_or_path": "x",
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "use_cache": True,
        "pretraining_tp": 1,
    }
    assert (
        described(folder_with(tmp_path, {**LLAMA, **more, "sliding_window": None})).family
        == "llama3"
    )


@pytest.mark.parametrize(
    ("base", "keys"),
    [
        (LLAMA, {"unsloth_fixed": True, "unsloth_version": "2024.9"}),
        (LLAMA, {"is_llama_config": True, "rope_interleaved": False, "transformers.js_config": {}}),
        (QWEN2, {"use_mrope": False, "sliding_window": 4096, "max_window_layers": 28}),
        (GPT2, {"n_special": 0, "predict_special_tokens": True, "output_past": True}),
    ],
)
def test_further_keys_of_published_folders_pass(
    tmp_path: Path, base: dict[str, Any], keys: dict[str, Any]
) -> None:
    """Of SmolLM, of what Qwen's authors and Unsloth publish, of the first GPT-2."""
    assert described(folder_with(tmp_path, {**base, **keys})) == described(
        folder_with(tmp_path, base)
    )


def test_missing_keys_have_transformers_defaults(tmp_path: Path):
    fields = described(folder_with(tmp_path, LLAMA)).fields
    assert fields["kv_heads"] == 4
    assert fields["norm_eps"] == 1e-6
    assert fields["rope_theta"] == 1e4
    assert fields["tied"] is False
    assert (
        described(folder_with(tmp_path, {**DEEPSEEK, "q_lora_rank": None})).fields["q_lora_rank"]
        == 0
    )
    assert described(folder_with(tmp_path, DEEPSEEK)).fields["q_lora_rank"] == 1536
    folder = folder_with(tmp_path, {**GPT2, "n_inner": None})
    assert described(folder).fields["ffn"] == 4 * 64
    assert described(folder_with(tmp_path, QWEN3_MOE)).fields["head_size"] == 16
    assert fields["padding_id"] is None
    gemma = PUBLISHED["gemma3-1b"]
    for padding, want in (({}, 0), ({"pad_token_id": None}, None), ({"pad_token_id": -1}, -1)):
        without = {name: value for name, value in gemma.items() if name != "pad_token_id"}
        found = described(folder_with(tmp_path, {**without, **padding}))
        assert found.fields["padding_id"] == want
    qwen3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}
    assert described(folder_with(tmp_path, qwen3)).fields["head_size"] == 128


@pytest.mark.parametrize(
    "spelling",
    [
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
        },
        {
            "rope_theta": 5e5,
            "rope_scaling": {"type": "llama3", "factor": 8, "original_max_position_embeddings": 64},
        },
        {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
            "max_position_embeddings": 64,
        },
    ],
    ids=["published", "older", "newer"],
)
def test_rotary_embedding_is_read_in_every_spelling(tmp_path: Path, spelling: dict[str, Any]):
    folder = folder_with(tmp_path, {**LLAMA, **spelling})
    fields = described(folder).fields
    scaling = {
        name.removeprefix("rope_scaling_"): fields[name]
        for name in fields
        if name.startswith("rope_scaling_")
    }
    assert fields["rope_theta"] == 5e5
    assert scaling == {
        "factor": 8,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context": 64,
    }


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "sliding_window_pattern": 2},
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window_pattern": None,
        },
    ],
    ids=["published", "newer"],
)
def test_gemma3s_two_kinds_of_layers_are_read_in_every_spelling(
    tmp_path: Path, spelling: dict[str, Any]
):
    folder = folder_with(tmp_path, {**GEMMA3, **spelling})
    fields = described(folder).fields
    assert fields["rope_theta"] == 5e5
    assert fields["rope_local_theta"] == 2e4
    assert fields["global_every"] == 2


def test_a_window_of_null_is_no_window(tmp_path: Path):
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert described(folder_with(tmp_path, mistral)).fields["window"] == 4096
    assert (
        described(folder_with(tmp_path, {**mistral, "sliding_window": None})).fields["window"] == 0
    )


def test_yarn_without_mscales_scales_what_it_rotates_alone(tmp_path: Path):
    """transformers: the gain of cosine and sine is that of mscale 1, scores stay."""
    yarn = {
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 64,
            "mscale": 0.7,
        }
    }
    folder = folder_with(tmp_path, {**DEEPSEEK, **yarn})
    fields = described(folder).fields
    assert fields["rope_scaling_mscale"] == 1.0
    assert fields["rope_scaling_mscale_all_dim"] == 0.0


def test_configs_that_transformers_cannot_compute_are_not_written():
    softmax = PRESETS["deepseek-16b"]
    keys = [fault.key for fault in unwritable(softmax, FAMILIES)]
    assert keys == ["model.scoring"]
    odd = PRESETS["deepseek-v3-671b"].model_copy(update={"rope_scaling_mscale": 0.0})
    keys = [fault.key for fault in unwritable(odd, FAMILIES)]
    assert keys == ["model.rope_scaling_mscale"]
    keys = [fault.key for fault in unwritable(PRESETS["mnist-mlp"], FAMILIES)]
    assert keys == ["model.name"]


def test_original_keys_that_change_no_logit_are_kept():
    config = PRESETS["llama3-tiny"]
    kept = {
        "eos_token_id": 7,
        "hidden_size": 9,
        "transformers_version": "4.0",
        "rope_scaling": {"type": "linear"},
    }
    written = config_json(FAMILIES["llama3"].hf, config, dtype="float32", original=kept)
    assert written["eos_token_id"] == 7
    assert written["hidden_size"] == config.dim
    assert written["rope_scaling"] is None
    assert "transformers_version" not in written


def test_an_unknown_architecture_is_reported_with_the_known_ones(tmp_path: Path):
    folder = folder_with(tmp_path, {"architectures": ["OtherForCausalLM"], "model_type": "mamba"})
    with pytest.raises(
        CheckpointError,
        match=r"unknown architecture .got 'OtherForCausalLM'; need one of Deepseek.*Qwen3",
    ):
        described(folder)


def test_without_transformers_its_decoders_are_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(read_config, "architectures", dict)
    folder = folder_with(tmp_path, {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"})
    with pytest.raises(CheckpointError, match=r"Fix: pip install 'weft-train\[hf\]', which adds"):
        described(folder)


def test_a_family_is_known_by_its_type_where_no_architecture_is_named(tmp_path: Path):
    folder = folder_with(tmp_path, {**LLAMA, "architectures": None, "model_type": "llama"})
    assert described(folder).family == "llama3"


def test_from_hf_sets_the_model_and_suggests_fields_that_the_folder_does_not_decide(tmp_path: Path):
    folder = str(folder_with(tmp_path, {**DEEPSEEK, "num_nextn_predict_layers": 1}))
    run = try_load(["--model.from_hf", folder, "--model.balance_loss", "0"], FAMILIES).run
    assert run.model.name == "deepseek"
    assert run.model.preset is None
    assert run.model.architecture["dim"] == 64
    assert run.model.architecture["balance_loss"] == 0
    assert run.model.architecture["mtp_depth"] == 0, "there are no tensors for it"


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--model.dim", "128"], ["model.dim"]),
        (["--model.name", "gpt2"], ["model.name"]),
        (["--model.preset", "llama3-8b"], ["model.preset"]),
        (["--model.tied", "True", "--model.vocab", "300"], ["model.vocab", "model.tied"]),
        (["--model.dim", "64", "--model.name", "llama3"], []),
    ],
)
def test_flags_that_contradict_the_folder_are_faults(
    tmp_path: Path, words: list[str], keys: list[str]
):
    argv = ["--model.from_hf", str(folder_with(tmp_path, LLAMA)), *words]
    loaded = try_load(argv, FAMILIES)
    assert [fault.key for fault in loaded.faults] == keys
    assert loaded.run.model.architecture["dim"] == 64


def test_a_run_that_sets_every_field_does_not_need_its_folder(tmp_path: Path):
    folder = folder_with(tmp_path / "hf", LLAMA)
    argv = ["--model.from_hf", str(folder)]
    run = try_load(argv, FAMILIES).run
    (tmp_path / "run.toml").write_text(dump(run))
    (folder / "config.json").unlink()
    again = try_load([str(tmp_path / "run.toml")], FAMILIES)
    assert not again.faults
    assert again.run == run
    assert [fault.key for fault in try_load(["--model.from_hf", str(folder)], FAMILIES).faults] == [
        "model.from_hf"
    ]


def test_text_is_read_with_the_tokenizer_of_the_folder_unless_another_is_named(tmp_path: Path):
    folder = folder_with(tmp_path / "a", LLAMA)
    argv = ["--model.from_hf", str(folder)]
    tokenizer = try_load(argv, FAMILIES).run.data.tokenizer
    assert tokenizer == "bytes"
    (folder / "tokenizer.json").write_text("{}")
    assert try_load(["--model.from_hf", str(folder)], FAMILIES).run.data.tokenizer == str(
        folder / "tokenizer.json"
    )
    named = ["--model.from_hf", str(folder), "--data.tokenizer", "bytes"]
    assert try_load(named, FAMILIES).run.data.tokenizer == "bytes"


def test_another_folder_on_the_command_line_takes_the_place_of_that_in_the_file(tmp_path: Path):
    first = folder_with(tmp_path / "a", LLAMA)
    second = folder_with(tmp_path / "b", {**GPT2, "n_layer": 3})
    (tmp_path / "run.toml").write_text(f'[model]\nfrom_hf = "{first}"\nlayers = 2\n')
    argv = [str(tmp_path / "run.toml"), "--model.from_hf", str(second)]
    loaded = try_load(argv, FAMILIES)
    assert not loaded.faults
    assert loaded.run.model.name == "gpt2"
    assert loaded.run.model.architecture["layers"] == 3
