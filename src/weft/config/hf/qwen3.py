"""Owns config.json of Qwen3 (Qwen3ForCausalLM), and what its mixed models share with it."""

from __future__ import annotations

from weft.config.hf.table import ConfigTable, Fixed, Json, Key


def all_attend_fully(config: Json) -> list[str]:
    """`layer_types` of a model in which every token sees all before it."""
    layers = config.get("num_hidden_layers")
    return ["full_attention"] * (layers if isinstance(layers, int) else 0)


TRUNK_KEYS = (
    Key("num_hidden_layers", "layers"),
    Key("hidden_size", "dim"),
    Key("num_attention_heads", "heads"),
    Key("num_key_value_heads", "kv_heads", default=lambda config: config.get("num_attention_heads")),
    Key("head_dim", "head_size", default=128),
    Key("vocab_size", "vocab"),
    Key("max_position_embeddings", "max_seq_len", default=32_768),
    Key("rms_norm_eps", "norm_eps", default=1e-6),
    Key("tie_word_embeddings", "tied", default=False),
)
TRUNK_FIXED = (
    Fixed("hidden_act", ("silu", "swish"), is_written=True),
    Fixed("attention_bias", (False,), is_written=True),
    Fixed("use_sliding_window", (False,), is_written=True),
)
TRUNK_HARMLESS = frozenset(("sliding_window", "max_window_layers"))
"""Read by transformers under `use_sliding_window` alone."""

TABLE = ConfigTable(
    family="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    keys=(*TRUNK_KEYS, Key("intermediate_size", "ffn")),
    fixed=(*TRUNK_FIXED, Fixed("layer_types", same_as=all_attend_fully)),
    rope_types=("default",),
    harmless=TRUNK_HARMLESS,
)
