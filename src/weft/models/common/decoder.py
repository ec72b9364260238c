"""The decoder trunk: attention, layers and the block chain of a `DecoderConfig`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from weft.models.common.attention import Attend
from weft.models.common.decoder_config import DecoderConfig, DenseConfig
from weft.models.common.layers import Attention, DecoderLayer, Embed, Loss, SwiGLU, head_of
from weft.models.common.lazy_blocks import Builder, Builders
from weft.models.common.rope import Rope, scaling_of


def rms_norm(cfg: DecoderConfig) -> nn.RMSNorm:
    """Norm of the residual stream."""
    return nn.RMSNorm(cfg.dim, eps=cfg.norm_eps)


def attention(
    cfg: DecoderConfig,
    *,
    rope: Rope | None = None,
    qkv_bias: bool = False,
    qk_norm: type[nn.RMSNorm] | None = None,
    attend: Attend | None = None,
) -> Attention:
    """Make a layer's grouped-query attention.

    Args:
        rope: default: with `cfg.rope_theta` and `cfg.rope_scaling`.
        qkv_bias: whether q, k and v have biases; o has none.
        qk_norm: norm of each head of q and k, before it is rotated.
        attend: default: causal, scores times 1 / sqrt(head size).
    """
    return Attention(
        cfg.dim,
        heads=cfg.heads,
        kv_heads=cfg.kv_heads,
        head_size=cfg.head_size,
        qkv_bias=qkv_bias,
        rope=rope or default_rope(cfg),
        q_norm=qk_norm(cfg.head_size, eps=cfg.norm_eps) if qk_norm else None,
        k_norm=qk_norm(cfg.head_size, eps=cfg.norm_eps) if qk_norm else None,
        attend=attend,
    )


def default_rope(cfg: DecoderConfig) -> Rope:
    """Rotary embedding with `cfg.rope_theta` and `cfg.rope_scaling`."""
    scaling = scaling_of(cfg.rope_scaling, theta=cfg.rope_theta)
    return Rope(cfg.head_size, theta=cfg.rope_theta, scaling=scaling)


def dense_layer(cfg: DenseConfig, attn: nn.Module) -> DecoderLayer:
    """One layer with a SwiGLU feed-forward part."""
    return DecoderLayer(
        attn_norm=rms_norm(cfg), attn=attn, mlp_norm=rms_norm(cfg), mlp=SwiGLU(cfg.dim, cfg.ffn)
    )


def decoder_builders(
    cfg: DecoderConfig,
    layers: Sequence[Builder],
    *,
    embed: type[Embed] = Embed,
    norm: type[nn.RMSNorm] = nn.RMSNorm,
) -> Builders:
    """The chain of `cfg` around these layers; equal layers may have one builder.

    Args:
        embed: type of the first block.
        norm: type of the last norm.
    """
    first = partial(embed, cfg.vocab, cfg.dim, padding_id=cfg.padding_id)
    return chain_builders(first, layers, partial(_head, cfg, norm))


def chain_builders(
    embed: Builder, layers: Sequence[Builder], head: Builder, *, side_blocks: Builders | None = None
) -> Builders:
    """Builders by name: "embed", "layer0", ..., side blocks, "head", "loss"."""
    builders: dict[str, Builder] = {"embed": embed}
    for index, layer in enumerate(layers):
        builders[f"layer{index}"] = layer
    builders.update(side_blocks or {})
    builders["head"] = head
    builders["loss"] = Loss
    return builders


def _head(cfg: DecoderConfig, norm: type[nn.RMSNorm]) -> nn.Module:
    last_norm = norm(cfg.dim, eps=cfg.norm_eps)
    return head_of(last_norm, cfg.dim, vocab=cfg.vocab, labels=cfg.labels)
