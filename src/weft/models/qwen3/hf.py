"""Qwen3 in Hugging Face's format (Qwen3ForCausalLM)."""

from __future__ import annotations

from weft.config.hf.mapping import ConfigMapping, Fixed, HFMapping, Key, WeightMapping
from weft.config.hf.rope import ScaledRope
from weft.core.rope_scaling import KINDS
from weft.models.common.decoder_hf import (
    ATTENTION,
    DECODER_KEYS,
    MLP,
    NORMS,
    QK_NORMS,
    ROTARY_BUFFERS,
    SILU,
    decoder_rules,
    full_attention_layers,
)

KEYS = (
    *DECODER_KEYS,
    Key("max_position_embeddings", "max_seq_len", default=32_768),
    Key("tie_word_embeddings", "tied", default=False),
)
FIXED = (
    SILU,
    Fixed("attention_bias", (False,), is_written=True),
    Fixed("use_sliding_window", (False,), is_written=True),
    Fixed("layer_types", same_as=full_attention_layers),
)
IGNORED = frozenset(("sliding_window", "max_window_layers"))
"""Read by transformers under `use_sliding_window` alone."""

HF = HFMapping(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    config=ConfigMapping(
        keys=(*KEYS, Key("head_dim", "head_size", default=128), Key("intermediate_size", "ffn")),
        fixed=FIXED,
        rope=ScaledRope(("default", *KINDS)),
        ignored=IGNORED,
    ),
    weights=WeightMapping(
        rules=decoder_rules(NORMS, ATTENTION, QK_NORMS, MLP), ignored=ROTARY_BUFFERS
    ),
)
