"""The blocks of Qwen3's mixture-of-experts models."""

from __future__ import annotations

from functools import partial

from torch import nn

from weft.models.common.decoder import attention, decoder_builders, rms_norm
from weft.models.common.experts import Experts
from weft.models.common.lazy_blocks import Builders, build_all
from weft.models.common.moe import Choice, MoE, MoELayer, Router
from weft.models.qwen3_moe.config import Config


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; equal layers have the same one."""
    layer = partial(_layer, cfg)
    return decoder_builders(cfg, [layer] * cfg.layers)


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return build_all(builders(cfg))


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
