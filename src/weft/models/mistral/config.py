"""Mistral (Jiang et al. 2023): the LLaMA architecture with sliding-window attention."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from weft.core.model_config import AxisTable
from weft.models.common.decoder_config import (
    DECODER_AXES,
    GATED_MLP_AXES,
    ContextLength,
    DenseConfig,
    HeadSize,
    decoder_ties,
    dense_init,
)


class Config(DenseConfig):
    """Mistral's shape; the defaults are mistral-tiny."""

    family: ClassVar[str] = "mistral"

    head_size: HeadSize = 32
    max_seq_len: ContextLength = 32_768
    norm_eps: float = Field(1e-5, gt=0, description="added to the mean square in RMSNorm")
    window: int = Field(
        64,
        ge=0,
        description="keys that a query attends to, its own among them; 0 for all before it",
    )

    def window_of(self, layer: int) -> int | None:
        return self.window or None


PRESETS = {
    "mistral-tiny": Config(),
    "mistral-7b": Config(  # v0.1
        layers=32,
        dim=4096,
        heads=32,
        kv_heads=8,
        head_size=128,
        ffn=14_336,
        vocab=32_000,
        window=4096,
    ),
}

AXES: AxisTable = {**DECODER_AXES, **GATED_MLP_AXES}
ties = decoder_ties
init = dense_init
