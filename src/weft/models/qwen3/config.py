"""Qwen3 (Yang et al. 2025): normalised queries and keys, head size independent of dim, grouped key/value heads, SwiGLU."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from weft.core.model_config import AxisTable
from weft.models.common.decoder_config import (
    DECODER_AXES,
    GATED_MLP_AXES,
    QK_NORM_AXES,
    DenseConfig,
    decoder_ties,
    dense_init,
)


class Config(DenseConfig):
    """Qwen3's shape; the defaults are qwen3-tiny."""

    family: ClassVar[str] = "qwen3"

    head_size: int = Field(
        32,
        ge=2,
        multiple_of=2,
        description="width of a head; heads x head_size need not be dim",
    )
    max_seq_len: int = Field(
        40_960,
        ge=1,
        description="context length of the published model; informational",
    )
    rope_theta: float = Field(1_000_000.0, gt=0, description="base of RoPE's wavelengths")


def _published(
    *,
    layers: int,
    dim: int,
    heads: int,
    ffn: int,
    tied: bool = False,
) -> Config:
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
