"""Qwen2 in Hugging Face's format (Qwen2ForCausalLM)."""

from __future__ import annotations

from weft.config.hf.mapping import ConfigMapping, Fixed, HFMapping, Key, WeightMapping
from weft.config.hf.rope import ScaledRope
from weft.core.rope_scaling import KINDS
from weft.models.common.decoder_hf import (
    ATTENTION,
    DECODER_KEYS,
    MLP,
    NORMS,
    QKV_BIAS,
    ROTARY_BUFFERS,
    SILU,
    decoder_rules,
    full_attention_layers,
    full_width_head_size,
)

HF = HFMapping(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    config=ConfigMapping(
        keys=(
            *DECODER_KEYS,
            Key("intermediate_size", "ffn"),
            Key("max_position_embeddings", "max_seq_len", default=32_768),
            Key("tie_word_embeddings", "tied", default=False),
        ),
        fixed=(
            SILU,
            Fixed("head_dim", same_as=full_width_head_size),
            Fixed("use_sliding_window", (False,), is_written=True),
            Fixed("layer_types", same_as=full_attention_layers),
        ),
        rope=ScaledRope(("default", *KINDS)),
        ignored=frozenset(
            ("sliding_window", "max_window_layers")
        ),  # read under use_sliding_window alone
    ),
    weights=WeightMapping(
        rules=decoder_rules(NORMS, ATTENTION, QKV_BIAS, MLP), ignored=ROTARY_BUFFERS
    ),
)
