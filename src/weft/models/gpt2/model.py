"""The blocks of GPT-2."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.common.attention import Attend
from weft.models.common.batch import Batch
from weft.models.common.decoder import chain_builders
from weft.models.common.layers import Attention, DecoderLayer, head_of
from weft.models.common.lazy_blocks import Builders, build_all
from weft.models.gpt2.config import Config


class EmbedWithPositions(nn.Module):
    """Tokens to vectors, plus a learned vector for each position."""

    def __init__(self, vocab: int, dim: int, *, max_seq_len: int, dropout: float) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_seq_len, dim)
        self.dropout = dropout

    def forward(self, tokens_BS: Tensor, batch: Batch) -> Tensor:
        x_BSD: Tensor = self.tok(tokens_BS) + self.pos(batch.positions)
        return F.dropout(x_BSD, self.dropout, self.training)


class GeluMLP(nn.Module):
    """down(gelu(up(x))) with the tanh form of GELU (Hendrycks and Gimpel 2016)."""

    def __init__(self, dim: int, ffn: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(dim, ffn)
        self.down = nn.Linear(ffn, dim)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x), approximate="tanh")
        out: Tensor = self.down(hidden)
        return F.dropout(out, self.dropout, self.training)


def builders(cfg: Config) -> Builders:
    """Builders of the blocks; all layers have the same one."""
    layer = partial(_layer, cfg)
    return chain_builders(partial(_embed, cfg), [layer] * cfg.layers, partial(_head, cfg))


def blocks(cfg: Config) -> dict[str, nn.Module]:
    """The chain "embed", "layer0", ..., "head", "loss"."""
    return build_all(builders(cfg))


def _embed(cfg: Config) -> EmbedWithPositions:
    return EmbedWithPositions(cfg.vocab, cfg.dim, max_seq_len=cfg.max_seq_len, dropout=cfg.dropout)


def _head(cfg: Config) -> nn.Module:
    return head_of(_norm(cfg), cfg.dim, vocab=cfg.vocab, labels=cfg.labels)


def _layer(cfg: Config) -> DecoderLayer:
    attn = Attention(
        cfg.dim,
        heads=cfg.heads,
        kv_heads=cfg.heads,
        head_size=cfg.dim // cfg.heads,
        qkv_bias=True,
        out_bias=True,
        attend=Attend(dropout=cfg.dropout),
        dropout=cfg.dropout,
    )
    mlp = GeluMLP(cfg.dim, cfg.ffn, dropout=cfg.dropout)
    return DecoderLayer(attn_norm=_norm(cfg), attn=attn, mlp_norm=_norm(cfg), mlp=mlp)


def _norm(cfg: Config) -> nn.LayerNorm:
    return nn.LayerNorm(cfg.dim, eps=cfg.norm_eps)
