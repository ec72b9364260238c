"""Owns config.json of LLaMA (LlamaForCausalLM)."""

from __future__ import annotations

from weft.config.hf.table import ConfigTable, Fixed, Json, Key


def head_size(config: Json) -> int:
    """What weft takes: heads fill the width of the model."""
    dim, heads = (config.get(key) for key in ("hidden_size", "num_attention_heads"))
    return dim // heads if isinstance(dim, int) and isinstance(heads, int) and heads > 0 else 0


TABLE = ConfigTable(
    family="llama3",
    architecture="LlamaForCausalLM",
    model_type="llama",
    keys=(
        Key("num_hidden_layers", "layers"),
        Key("hidden_size", "dim"),
        Key("num_attention_heads", "heads"),
        Key("num_key_value_heads", "kv_heads", default=lambda config: config.get("num_attention_heads")),
        Key("intermediate_size", "ffn"),
        Key("vocab_size", "vocab"),
        Key("max_position_embeddings", "max_seq_len", default=2048),
        Key("rms_norm_eps", "norm_eps", default=1e-6),
        Key("tie_word_embeddings", "tied", default=False),
    ),
    fixed=(
        Fixed("head_dim", same_as=head_size),
        Fixed("hidden_act", ("silu", "swish"), is_written=True),
        Fixed("attention_bias", (False,), is_written=True),
        Fixed("mlp_bias", (False,), is_written=True),
        Fixed("sliding_window"),
    ),
    rope_types=("default", "llama3"),
)
