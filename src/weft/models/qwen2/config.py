"""Qwen2 (Yang et al. 2024): the LLaMA architecture with biased queries, keys and values."""

from __future__ import annotations

from typing import ClassVar

from weft.core.model_config import AxisTable, Draw
from weft.models.common.decoder_config import (
    DECODER_AXES,
    GATED_MLP_AXES,
    QKV_BIAS_AXES,
    ContextLength,
    FullWidthConfig,
    RopeTheta,
    decoder_ties,
    dense_init,
)


class Config(FullWidthConfig):
    """Qwen2's shape; the defaults are qwen2-tiny."""

    family: ClassVar[str] = "qwen2"

    max_seq_len: ContextLength = 131_072
    rope_theta: RopeTheta = 1_000_000.0


PRESETS = {
    "qwen2-tiny": Config(),
    "qwen2-0.5b": Config(
        layers=24, dim=896, heads=14, kv_heads=2, ffn=4864, vocab=151_936, tied=True
    ),
    "qwen2-7b": Config(layers=28, dim=3584, heads=28, kv_heads=4, ffn=18_944, vocab=152_064),
}

AXES: AxisTable = {**DECODER_AXES, **QKV_BIAS_AXES, **GATED_MLP_AXES}
ties = decoder_ties


def init(cfg: Config) -> dict[str, Draw]:
    """The trunk's values; biases are zero."""
    return {**dense_init(cfg), "layer*.attn.[qkv].bias": ("zeros",)}
