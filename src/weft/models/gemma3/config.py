"""Gemma 3, text models (Gemma Team 2025): layers with a window and layers that see all tokens, norms around each part."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from weft.core.model_config import AxisTable, Draw
from weft.models.common.decoder_config import (
    DECODER_AXES,
    GATED_MLP_AXES,
    QK_NORM_AXES,
    ContextLength,
    DenseConfig,
    HeadSize,
    decoder_ties,
    dense_init,
)


class Config(DenseConfig):
    """Gemma 3's shape; the defaults are gemma3-tiny."""

    family: ClassVar[str] = "gemma3"

    head_size: HeadSize = 32
    max_seq_len: ContextLength = 32_768
    tied: bool = Field(True, description="the head projects with the token embedding")
    rope_theta: float = Field(
        1_000_000.0, gt=0, description="base of RoPE's wavelengths in layers without a window"
    )
    rope_local_theta: float = Field(
        10_000.0, gt=0, description="base of RoPE's wavelengths in layers with a window"
    )
    window: int = Field(64, ge=1, description="keys that a query attends to, its own among them")
    global_every: int = Field(2, ge=1, description="every n-th layer has no window")
    query_pre_attn_scalar: int = Field(32, ge=1, description="scores are q k / sqrt of this")

    def window_of(self, layer: int) -> int | None:
        is_global = (layer + 1) % self.global_every == 0
        return None if is_global else self.window


PRESETS = {
    "gemma3-tiny": Config(),
    "gemma3-1b": Config(
        layers=26,
        dim=1152,
        heads=4,
        kv_heads=1,
        head_size=256,
        ffn=6912,
        vocab=262_144,
        padding_id=0,
        window=512,
        global_every=6,
        query_pre_attn_scalar=256,
    ),
}

AXES: AxisTable = {
    **DECODER_AXES,
    **QK_NORM_AXES,
    **GATED_MLP_AXES,
    "layer*.attn_post_norm.weight": ("norm",),
    "layer*.mlp_post_norm.weight": ("norm",),
}
ties = decoder_ties


def init(cfg: Config) -> dict[str, Draw]:
    """The trunk's values; weights of norms are stored minus 1, so they are zero."""
    return {**dense_init(cfg), "*norm.weight": ("zeros",)}
