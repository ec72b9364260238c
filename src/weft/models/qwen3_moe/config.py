"""Qwen3's mixture-of-experts models (Yang et al. 2025): Qwen3's attention, softmax routing, no shared expert."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import AxisTable, Draw, LinearShapes, gated_linears, in_layers
from weft.models.common.decoder_config import (
    DECODER_AXES,
    INIT_STD,
    QK_NORM_AXES,
    ContextLength,
    DecoderConfig,
    HeadSize,
    RopeTheta,
    check_at_most,
    decoder_init,
    decoder_ties,
    residual_std,
)


class Config(DecoderConfig):
    """Shape of the mixture-of-experts models; the defaults are qwen3-moe-tiny."""

    family: ClassVar[str] = "qwen3-moe"

    head_size: HeadSize = 32
    max_seq_len: ContextLength = 40_960
    rope_theta: RopeTheta = 1_000_000.0
    experts: int = Field(8, ge=1, description="experts of each layer")
    top_k: int = Field(2, ge=1, description="experts that each token visits")
    expert_ffn: int = Field(64, ge=1, description="width of an expert")
    norm_topk_prob: bool = Field(True, description="weights of a token's experts sum to 1")
    balance_loss: float = Field(
        0.0, ge=0, description="weight of the sequence-wise balance loss; 0 for none"
    )

    @field_validator("top_k")
    @classmethod
    def _top_k_exist(cls, top_k: int, info: ValidationInfo) -> int:
        return check_at_most(top_k, info.data.get("experts", top_k), of="experts")

    def feed_forward_axes(self) -> dict[str, int]:
        return {"ffn": self.expert_ffn, "experts": self.experts}

    def expert_linears(self) -> LinearShapes:
        own = gated_linears(self.dim, self.expert_ffn, inside="mlp.experts")
        return in_layers(own, range(self.layers))

    def feed_forward_weights(self) -> int:
        router = self.dim * self.experts
        return router + self.top_k * 3 * self.dim * self.expert_ffn


PRESETS = {
    "qwen3-moe-tiny": Config(),
    "qwen3-moe-30b-a3b": Config(
        layers=48,
        dim=2048,
        heads=32,
        kv_heads=4,
        head_size=128,
        vocab=151_936,
        experts=128,
        top_k=8,
        expert_ffn=768,
    ),
}

AXES: AxisTable = {
    **DECODER_AXES,
    **QK_NORM_AXES,
    "layer*.mlp.router.proj.weight": ("router_experts", "embed"),
    "layer*.mlp.experts.gate": ("experts", "ffn", "embed"),
    "layer*.mlp.experts.up": ("experts", "ffn", "embed"),
    "layer*.mlp.experts.down": ("experts", "embed", "ffn"),
}
ties = decoder_ties


def init(cfg: Config) -> dict[str, Draw]:
    """The trunk's values; experts as the MLPs of dense models."""
    return {
        **decoder_init(cfg),
        "layer*.mlp.router.proj.weight": ("normal", INIT_STD),
        "layer*.mlp.experts.gate": ("normal", INIT_STD),
        "layer*.mlp.experts.up": ("normal", INIT_STD),
        "layer*.mlp.experts.down": ("normal", residual_std(cfg.layers)),
    }
