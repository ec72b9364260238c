"""Owns Qwen3's mixture-of-experts models (Yang et al. 2025): Qwen3's trunk, softmax routing, no shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field, field_validator
from pydantic_core.core_schema import ValidationInfo

from weft.core.model_config import AxisTable, BlockSpec, Draw
from weft.models import qwen3

if TYPE_CHECKING:
    from torch import nn


class Config(qwen3.Trunk):
    """The mixed models' shape; the defaults are qwen3-moe-tiny."""

    family: ClassVar[str] = "qwen3-moe"

    experts: int = Field(8, ge=1, description="experts of each layer")
    top_k: int = Field(2, ge=1, description="experts that each token visits")
    expert_ffn: int = Field(64, ge=1, description="width of an expert")
    norm_topk_prob: bool = Field(True, description="weights of a token's experts sum to 1")
    balance_loss: float = Field(0.0, ge=0, description="weight of the sequence-wise balance loss; 0 for none")

    @field_validator("top_k")
    @classmethod
    def _top_k_are_there(cls, top_k: int, info: ValidationInfo) -> int:
        experts = info.data.get("experts", top_k)
        if top_k > experts:
            raise ValueError(f"{top_k} of {experts} experts; try {experts} or less")
        return top_k

    def axis_sizes(self) -> dict[str, int]:
        attention = {"heads": self.heads, "kv_heads": self.kv_heads}
        return {**attention, "ffn": self.expert_ffn, "experts": self.experts, "vocab": self.vocab}

    def block_specs(self, seq_len: int) -> tuple[BlockSpec, ...]:
        met = self.dim * self.experts + self.top_k * 3 * self.dim * self.expert_ffn
        return self.chain_specs(seq_len, mlp_weights=met)


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
    **qwen3.TRUNK_AXES,
    "layer*.mlp.router.proj.weight": ("router_experts", "embed"),
    "layer*.mlp.experts.gate": ("experts", "ffn", "embed"),
    "layer*.mlp.experts.up": ("experts", "ffn", "embed"),
    "layer*.mlp.experts.down": ("experts", "embed", "ffn"),
}

ties = qwen3.ties


def init(cfg: Config) -> dict[str, Draw]:
    """Normal, std 0.02; projections onto the residual stream are scaled by 1 / sqrt(2 x layers)."""
    return {
        **qwen3.trunk_init(cfg),
        "layer*.mlp.router.proj.weight": ("normal", 0.02),
        "layer*.mlp.experts.gate": ("normal", 0.02),
        "layer*.mlp.experts.up": ("normal", 0.02),
        "layer*.mlp.experts.down": ("normal", qwen3.residual_std(cfg)),
    }


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"; `ties` are not applied yet."""
    from weft.models.common.experts import Experts  # late: a config is read and checked without torch
    from weft.models.common.moe import Choice, MoE, MoEBlock, Router

    choice = Choice(num_experts=cfg.experts, top_k=cfg.top_k, scoring="softmax", norm_topk_prob=cfg.norm_topk_prob)

    def layer() -> nn.Module:
        mlp = MoE(
            router=Router(cfg.dim, choice),
            experts=Experts(cfg.dim, cfg.expert_ffn, num_experts=cfg.experts),
            balance_weight=cfg.balance_loss,
        )
        return MoEBlock(attn_norm=qwen3.norm(cfg), attn=qwen3.attention(cfg), mlp_norm=qwen3.norm(cfg), mlp=mlp)

    return qwen3.chain_of(cfg, [layer() for _ in range(cfg.layers)])
