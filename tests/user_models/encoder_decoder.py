"""An encoder-decoder as one chain: blocks of the decoder hand on what the encoder gave beside their own output."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

import weft


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 32
    heads: int = 4
    vocab: int = 64
    source: int = 12
    target: int = 8


def INPUTS(c):
    return {
        "source": weft.InputSpec((c.source,), "int64", below=c.vocab),
        "decoded": weft.InputSpec((c.target,), "int64", below=c.vocab),
        "mask": weft.InputSpec((c.source,), "bool"),
        "targets": weft.InputSpec((c.target,), "int64", below=c.vocab),
    }


class Attention(nn.Module):
    def __init__(self, c, causal=False):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(4))
        self.size, self.causal = c.dim // c.heads, causal

    def forward(self, x, y, mask=None):
        q = self.q(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
        k, v = (f(y).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.k, self.v))
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        return self.out(z.transpose(1, 2).flatten(2))


class FF(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.up, self.down = (
            nn.Linear(c.dim, 4 * c.dim, bias=False),
            nn.Linear(4 * c.dim, c.dim, bias=False),
        )

    def forward(self, x):
        return self.down(F.relu(self.up(x)))


def keys_of(batch):
    mask = batch.fields["mask"].clone()
    mask[:, 0] = True
    return mask[:, None, None, :]


class EmbedSource(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab, c.dim), nn.Embedding(c.source, c.dim)

    def forward(self, ids):
        return self.tok(ids) + self.pos.weight


class Encoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2, self.attn, self.ff = (
            nn.LayerNorm(c.dim),
            nn.LayerNorm(c.dim),
            Attention(c),
            FF(c),
        )

    def forward(self, x, batch):
        y = self.norm1(x)
        x = x + self.attn(y, y, keys_of(batch))
        return x + self.ff(self.norm2(x))


class EmbedTarget(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(c.vocab, c.dim), nn.Embedding(c.target, c.dim)

    def forward(self, x, batch):
        return x, self.tok(batch.fields["decoded"]) + self.pos.weight


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(c.dim) for _ in range(3))
        self.own, self.cross, self.ff = Attention(c, causal=True), Attention(c), FF(c)

    def forward(self, both, batch):
        encoded, x = both
        y = self.norm1(x)
        x = x + self.own(y, y)
        x = x + self.cross(self.norm2(x), encoded, keys_of(batch))
        return encoded, x + self.ff(self.norm3(x))


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(c.dim), nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, both):
        return self.proj(self.norm(both[1]))


def blocks(c):
    return {
        "source": EmbedSource(c),
        **{f"layer{i}": Encoder(c) for i in range(c.layers)},
        "decoded": EmbedTarget(c),
        **{f"decoder{i}": Decoder(c) for i in range(c.layers)},
        "head": Head(c),
    }


AXES = {
    "source.*": (None, None),
    "decoded.*": (None, None),
    "*.norm?.*": (None,),
    "head.norm.*": (None,),
    "*.[qkv].weight": ("heads", None),
    "*.out.weight": (None, "heads"),
    "*.up.weight": ("ffn", None),
    "*.down.weight": (None, "ffn"),
    "head.proj.weight": ("vocab", None),
}
