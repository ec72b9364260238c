"""Sizes of a decoder of transformers as fields of a weft config, their names in transformers, and tiny defaults. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SETTINGS = "settings"
"""Field with all other keys of config.json, as JSON."""
DROPOUT = "dropout"
"""Field that says whether settings drop out."""
LABELS = "labels"
"""Field with the number of scores of a text; 0: the head is that of the vocabulary."""
LABEL_KEYS = ("num_labels", "id2label", "label2id")
AXES = "axes"
"""Field with the axes that a run shards, by patterns of names, as JSON."""


@dataclass(frozen=True)
class Size:
    """A field of the config.

    Attributes:
        names: of the attribute in configs of transformers; the first one that a config has.
        tiny: default, small enough to train on a laptop.
        help: of the flag.
    """

    names: tuple[str, ...]
    tiny: int
    help: str


SIZES: Mapping[str, Size] = {
    "layers": Size(
        ("decoder_layers", "num_hidden_layers", "num_layers", "n_layers", "n_layer"),
        2,
        "transformer layers",
    ),
    "dim": Size(("hidden_size", "d_model", "n_embd"), 64, "width of the stream"),
    "heads": Size(
        ("decoder_attention_heads", "num_attention_heads", "n_heads", "n_head"),
        4,
        "attention heads",
    ),
    "kv_heads": Size(("num_key_value_heads", "num_kv_heads"), 2, "heads of keys and values"),
    "head_size": Size(("head_dim", "kv_channels"), 16, "entries of a head"),
    "ffn": Size(
        ("decoder_ffn_dim", "intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "d_ff"),
        96,
        "width of the feed-forward part",
    ),
    "experts": Size(
        ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
        4,
        "experts of a layer",
    ),
    "top_k": Size(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
        2,
        "experts of a token",
    ),
    "expert_ffn": Size(
        ("moe_intermediate_size", "expert_ffn_hidden_size"), 32, "width of an expert"
    ),
    "vocab": Size(("vocab_size",), 256, "token ids"),
    "max_seq_len": Size(
        ("max_position_embeddings", "max_seq_len", "n_positions", "max_sequence_length"),
        1024,
        "longest sequence",
    ),
}

TINY: Mapping[str, Any] = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "sliding_window": 64,
    "word_embed_proj_dim": 64,
    "mamba_n_heads": 8,  # of 16 entries: twice the width together
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "num_heads": 8,
    "state_size": 16,
    "n_groups": 1,
    "chunk_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "rotary_dim": 8,
    "tie_word_embeddings": False,
    "is_decoder": True,
}
"""Other attributes of configs that are built from sizes, where a config has them."""
TINY_OF: Mapping[str, Mapping[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "dots1": {"n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0}
            for kind in ("full_attention", "sliding_attention")
        }
    },
    "bailing_hybrid": {"num_expert_group": 1},
    "nemotron_h": {
        "layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "moe_shared_expert_intermediate_size": 32,
    },
    "gemma4_text": {
        "layers": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
    },
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "mlp_layer_types": ["hash_moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "index_topk": 2,
    },
    "gemma3n_text": {
        "layers": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
    },
    "zamba": {"layers": 4, "layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers": 4, "layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"top_k": 1, "router_hidden_size": 32},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "dbrx": {
        "attn_config": {"clip_qkv": 8.0, "kv_n_heads": 2, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_top_k": 2},
    },
    "big_bird": {"attention_type": "original_full"},
}
"""Attributes without which transformers cannot build a model of few layers, or of no file at all; and
sizes (by their fields) that it does not allow others for.
"""
MAY_BE_NONE = ("kv_heads", "head_size", "experts", "top_k", "ffn")
"""Sizes that configs may leave out: they follow from the others then."""
COMPUTED = frozenset({("phimoe", "router_jitter_noise")})
"""Keys with the name of noise that a model computes with, also outside of training: the band of
scores within which Phi-3.5-MoE's router weighs experts.
"""
OF_INFERENCE = ("rescale_every",)
"""Keys by which inference divides weights and activations by powers of 2, for types of 16 bits."""
OUTPUTS = ("output_router_logits", "output_hidden_states", "_output_attentions", "use_cache")
"""Keys by which a forward returns more than logits: hooks that it adds to its modules keep it, and
caches need layers of attention.
"""
NONE = 0
"""Value of a size that a config leaves out and that does not follow: experts of a model without."""
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
"""Ids that a small vocabulary may not have."""


def fields_of(config: Any) -> Iterator[tuple[str, str]]:
    """(field, attribute) of the sizes that a config of transformers has."""
    given = vars(config)
    for field, size in SIZES.items():
        if field in ("head_size", "kv_heads") and "qk_rope_head_dim" in given:
            continue  # they follow from the parts of latent attention
        names = [own_name(config, name) for name in size.names]
        values = [(name, given[name]) for name in names if name in given]
        if field == "layers":  # some count them by a list of their types
            values += [
                (name, getattr(config, name)) for name in names if _is_property(config, name)
            ]
        for attribute, value in values:
            is_size = type(value) is int or (value is None and field in MAY_BE_NONE)
            if is_size and _is_settable(config, attribute):
                yield field, attribute
                break


def own_name(config: Any, name: str) -> str:
    """The attribute of a config that one of its names stands for."""
    found: str = type(config).attribute_map.get(name, name)
    return found


def tiny_size(model_type: str, field: str) -> int:
    """The default of a size."""
    found: int = TINY_OF.get(model_type, {}).get(field, SIZES[field].tiny)
    return found


def tiny_settings(model_type: str) -> dict[str, Any]:
    """The attributes of `TINY_OF` that are no sizes."""
    return {name: x for name, x in TINY_OF.get(model_type, {}).items() if name not in SIZES}


def _is_property(config: Any, name: str) -> bool:
    return isinstance(getattr(type(config), name, None), property)


def _is_settable(config: Any, name: str) -> bool:
    """Whether a value may be given: no property without a setter."""
    owner = getattr(type(config), name, None)
    return not (isinstance(owner, property) and owner.fset is None)


def is_drop_out(name: str, value: object) -> bool:
    """Whether a key of config.json is a probability of dropout that is not 0."""
    return _has_word(name, value, ("dropout", "_pdrop", "drop_rate"))


def is_noise(model_type: str, name: str, value: object) -> bool:
    """Whether a key of config.json skips layers, or disturbs numbers, at random."""
    is_computed = (model_type, name) in COMPUTED
    return not is_computed and _has_word(name, value, ("layerdrop", "jitter"))


def is_clip(name: str, value: object) -> bool:
    """Whether a key of config.json has parameters clipped within the forward of training."""
    return _has_word(name, value, ("coef_clip",))


def balance_losses(config: Mapping[str, Any]) -> dict[str, float]:
    """Weights of the losses that a config of transformers adds for an even load of experts."""
    is_asked = config.get(OUTPUTS[0], False)
    return {k: x for k, x in config.items() if is_asked and _has_word(k, x, ("aux_loss",))}


def _has_word(name: str, value: object, words: tuple[str, ...]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and value != 0 and any(word in name for word in words)


def derived(fields: Mapping[str, Any]) -> dict[str, int]:
    """The sizes that a config leaves out, from the others."""
    heads = fields.get("heads") or 1
    usual = {"kv_heads": heads, "head_size": fields["dim"] // heads, "ffn": 4 * fields["dim"]}
    return {name: value for name, value in usual.items() if fields.get(name) is None}
