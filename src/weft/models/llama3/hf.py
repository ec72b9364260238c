"""LLaMA 3 in Hugging Face's format (LlamaForCausalLM)."""

from __future__ import annotations

from weft.config.hf.mapping import ConfigMapping, Fixed, HFMapping, Key, WeightMapping
from weft.config.hf.rope import ScaledRope
from weft.core.rope_scaling import KINDS
from weft.models.common.decoder_hf import (
    ATTENTION,
    DECODER_KEYS,
    MLP,
    NORMS,
    ROTARY_BUFFERS,
    SILU,
    decoder_rules,
    full_width_head_size,
)

HF = HFMapping(
    architecture="LlamaForCausalLM",
    model_type="llama",
    config=ConfigMapping(
        keys=(
            *DECODER_KEYS,
            Key("intermediate_size", "ffn"),
            Key("max_position_embeddings", "max_seq_len", default=2048),
            Key("tie_word_embeddings", "tied", default=False),
        ),
        fixed=(
            SILU,
            Fixed("head_dim", same_as=full_width_head_size),
            Fixed("attention_bias", (False,), is_written=True),
            Fixed("mlp_bias", (False,), is_written=True),
            Fixed("sliding_window"),
        ),
        rope=ScaledRope(("default", *KINDS), own="llama3"),
    ),
    weights=WeightMapping(rules=decoder_rules(NORMS, ATTENTION, MLP), ignored=ROTARY_BUFFERS),
)
