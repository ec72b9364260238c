"""LLaMA 3 (Grattafiori et al. 2024): RMSNorm, RoPE with llama3 scaling, grouped key/value heads, SwiGLU."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import AxisTable
from weft.models.common.decoder_config import (
    DECODER_AXES,
    GATED_MLP_AXES,
    FullWidthConfig,
    decoder_ties,
    dense_init,
)


class Config(FullWidthConfig):
    """LLaMA 3's shape; the defaults are llama3-tiny."""

    family: ClassVar[str] = "llama3"

    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    rope_scaling_factor: float = Field(
        1.0, gt=0, description="long wavelengths grow by this; 1 turns scaling off"
    )
    rope_scaling_low_freq_factor: float = Field(
        1.0, gt=0, description="waves over original context / this are long"
    )
    rope_scaling_high_freq_factor: float = Field(
        4.0, gt=0, description="waves under original context / this stay"
    )
    rope_scaling_original_context: int = Field(
        8192, ge=1, description="context before scaling, in tokens"
    )

    @field_validator("rope_scaling_factor")
    @classmethod
    def _is_scaled_once(cls, factor: float, info: ValidationInfo) -> float:
        if factor != 1 and info.data.get("rope_scaling") is not None:
            raise ValueError(f"{factor} beside rope_scaling, which is another scaling; try 1")
        return factor

    @field_validator("rope_scaling_high_freq_factor")
    @classmethod
    def _high_is_above_low(cls, high: float, info: ValidationInfo) -> float:
        low = info.data.get("rope_scaling_low_freq_factor", 0.0)
        if high <= low:
            raise ValueError(
                f"{high} is not above rope_scaling_low_freq_factor {low}; try {4 * low}"
            )
        return high


def _published(
    *, layers: int, dim: int, heads: int, ffn: int, scaling: float, tied: bool = False
) -> Config:
    """The fields that LLaMA 3.1 and 3.2 share: vocabulary, context, 8 key/value heads, RoPE's base
    and ramp.
    """
    return Config(
        layers=layers,
        dim=dim,
        heads=heads,
        kv_heads=8,
        ffn=ffn,
        vocab=128_256,
        max_seq_len=131_072,
        tied=tied,
        rope_theta=500_000.0,
        rope_scaling_factor=scaling,
    )


PRESETS = {
    "llama3-tiny": Config(),
    "llama3-1b": _published(layers=16, dim=2048, heads=32, ffn=8192, scaling=32.0, tied=True),
    "llama3-3b": _published(layers=28, dim=3072, heads=24, ffn=8192, scaling=32.0, tied=True),
    "llama3-8b": _published(layers=32, dim=4096, heads=32, ffn=14336, scaling=8.0),
    "llama3-70b": _published(layers=80, dim=8192, heads=64, ffn=28672, scaling=8.0),
    "llama3-405b": _published(layers=126, dim=16384, heads=128, ffn=53248, scaling=8.0),
}

AXES: AxisTable = {**DECODER_AXES, **GATED_MLP_AXES}
ties = decoder_ties
init = dense_init
