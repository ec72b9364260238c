"""The blocks of Gemma 3: the decoder trunk with two kinds of layers, norms around each part, a scaled embedding."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.attention_mask import AttentionMask
from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.models.common.decoder import attention, decoder_builders, default_rope
from weft.models.common.layers import Attention, Embed
from weft.models.common.lazy_blocks import Builders, build_all
from weft.models.common.rope import Rope
from weft.models.gemma3.config import Config


class OffsetRMSNorm(nn.RMSNorm):
    """RMSNorm times (1 + weight), computed in float32 at least."""

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scale = 1 + self.weight.to(wide)
        normed = F.rms_norm(x.to(wide), self.normalized_shape, scale, self.eps)
        return normed.to(x.dtype)


class ScaledEmbed(Embed):
    """Tokens to vectors times sqrt(dim), rounded to the type of the weights.

    Attributes:
        embedding_scale: sqrt(dim).
    """

    def __init__(self, vocab: int, dim: int, *, padding_id: int | None = None) -> None:
        super().__init__(vocab, dim, padding_id=padding_id)
        self.embedding_scale = dim**0.5

    def forward(self, tokens_BS: Tensor, batch: Batch) -> Tensor:
        x_BSD = super().forward(tokens_BS, batch)
        scale = x_BSD.new_full((), self.embedding_scale)
        return x_BSD * scale


class GeGLU(nn.Module):
    """down(gelu(gate(x)) * up(x)) with the tanh form of GELU (Shazeer 2020)."""

    def __init__(self, dim: int, ffn: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, ffn, bias=False)
        self.up = nn.Linear(dim, ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.gate(x), approximate="tanh") * self.up(x)
        out: Tensor = self.down(hidden)
        return out


class SandwichLayer(nn.Module):
    """One layer: attention and MLP, each between two norms and beside a residual."""

    def __init__(self, cfg: Config, attn: Attention) -> None:
        super().__init__()
        self.attn_norm = OffsetRMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.attn = attn
        self.attn_post_norm = OffsetRMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp_norm = OffsetRMSNorm(cfg.dim, eps=cfg.norm_eps)
        self.mlp = GeGLU(cfg.dim, cfg.ffn)
        self.mlp_post_norm = OffsetRMSNorm(cfg.dim, eps=cfg.norm_eps)

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        attended = self.attn(self.attn_norm(x_BSD), batch)
        x_BSD = x_BSD + self.attn_post_norm(attended)
        out = self.mlp(self.mlp_norm(x_BSD))
        out_BSD: Tensor = x_BSD + self.mlp_post_norm(out)
        return out_BSD


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; equal layers have the same one."""
    windows = [cfg.window_of(layer) for layer in range(cfg.layers)]
    by_window = {window: partial(_layer, cfg, window) for window in windows}
    return decoder_builders(
        cfg, [by_window[window] for window in windows], embed=ScaledEmbed, norm=OffsetRMSNorm
    )


def _layer(cfg: Config, window: int | None) -> SandwichLayer:
    return SandwichLayer(cfg, _attention(cfg, window))


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return build_all(builders(cfg))


def _attention(cfg: Config, window: int | None) -> Attention:
    rope = default_rope(cfg)
    if window is not None:
        rope = Rope(cfg.head_size, theta=cfg.rope_local_theta)
    return attention(
        cfg,
        rope=rope,
        qk_norm=OffsetRMSNorm,
        attend=Attend(mask=AttentionMask(window=window), scale=cfg.query_pre_attn_scalar**-0.5),
    )
