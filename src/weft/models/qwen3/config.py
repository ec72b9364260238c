"""Qwen3 (Yang et al. 2025): normalised queries and keys, head size independent of dim, grouped key/value heads, SwiGLU."""

from __future__ import annotations

from typing import ClassVar

from weft.core.model_config import AxisTable
from weft.models.common.decoder_config import (
    DECODER_AXES,
    GATED_MLP_AXES,
    QK_NORM_AXES,
    ContextLength,
    DenseConfig,
    HeadSize,
    RopeTheta,
    decoder_ties,
    dense_init,
)


class Config(DenseConfig):
    """Qwen3's shape; the defaults are qwen3-tiny."""

    family: ClassVar[str] = "qwen3"

    head_size: HeadSize = 32
    max_seq_len: ContextLength = 40_960
    rope_theta: RopeTheta = 1_000_000.0


def _published(*, layers: int, dim: int, heads: int, ffn: int, tied: bool = False) -> Config:
    """The fields that the dense models share: 8 key/value heads, head size, vocabulary."""
    return Config(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=8,
        head_size=128,
        ffn=ffn,
        vocab=151_936,
        tied=tied,
    )


PRESETS = {
    "qwen3-tiny": Config(),
    "qwen3-0.6b": _published(layers=28, dim=1024, heads=16, ffn=3072, tied=True),
    "qwen3-8b": _published(layers=36, dim=4096, heads=32, ffn=12_288),
}

AXES: AxisTable = {**DECODER_AXES, **QK_NORM_AXES, **GATED_MLP_AXES}
ties = decoder_ties
init = dense_init
