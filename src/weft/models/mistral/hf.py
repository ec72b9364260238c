"""Mistral in Hugging Face's format (MistralForCausalLM)."""

from __future__ import annotations

from weft.config.hf.mapping import ConfigMapping, HFMapping, Key, WeightMapping
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
    architecture="MistralForCausalLM",
    model_type="mistral",
    config=ConfigMapping(
        keys=(
            *DECODER_KEYS,
            Key("head_dim", "head_size", default=full_width_head_size),
            Key("intermediate_size", "ffn"),
            Key("max_position_embeddings", "max_seq_len", default=131_072),
            Key("sliding_window", "window", default=4096, null=0),
            Key("tie_word_embeddings", "tied", default=False),
        ),
        fixed=(SILU,),
        rope=ScaledRope(("default", *KINDS)),
    ),
    weights=WeightMapping(rules=decoder_rules(NORMS, ATTENTION, MLP), ignored=ROTARY_BUFFERS),
)
