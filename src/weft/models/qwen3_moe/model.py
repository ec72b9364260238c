"""The blocks of Qwen3's mixture-of-experts models."""

from __future__ import annotations

from torch import nn

from weft.models.common.decoder import attention, decoder_chain, rms_norm
from weft.models.common.experts import Experts
from weft.models.common.moe import Choice, MoE, MoELayer, Router
from weft.models.qwen3_moe.config import Config


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return decoder_chain(cfg, [_layer(cfg) for _ in range(cfg.layers)])


def _layer(cfg: Config) -> MoELayer:
    return MoELayer(
        attn_norm=rms_norm(cfg),
        attn=attention(cfg, qk_norm=nn.RMSNorm),
        mlp_norm=rms_norm(cfg),
        mlp=_mixture(cfg),
    )


def _mixture(cfg: Config) -> MoE:
    choice = Choice(
        num_experts=cfg.experts,
        top_k=cfg.top_k,
        scoring="softmax",
        norm_topk_prob=cfg.norm_topk_prob,
    )
    return MoE(
        router=Router(cfg.dim, choice),
        experts=Experts(cfg.dim, cfg.expert_ffn, num_experts=cfg.experts),
        balance_weight=cfg.balance_loss,
    )
