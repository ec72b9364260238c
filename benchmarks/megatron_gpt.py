"""A GPT whose layers keep for the backward what those of Megatron-LM keep, with unfused attention and dropout.

Per layer, in bytes, for 16 bits: s b h (34 + 5 a s / h), with s tokens, b sequences, width h, a heads.
Source: Korthikanti et al. 2022 (arXiv 2205.05198), section 4.1. For accounts of memory: dropout drops nothing, and
parameters have no values, so that models of any size can be measured.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    layers: int = 22
    dim: int = 2304
    heads: int = 24
    vocab: int = 50304  # of GPT-2, padded to a multiple of 128
    context: int = 1024


class KeepAll(torch.autograd.Function):
    """Dropout with probability 0: it keeps a mask of one byte an entry, and its output is new."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.ones_like(x, dtype=torch.bool)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, dy):
        (mask,) = ctx.saved_tensors
        return dy * mask


class Tokens(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab, c.dim, device="meta")
        self.pos = nn.Embedding(c.context, c.dim, device="meta")

    def forward(self, ids, batch):
        return KeepAll.apply(self.tok(ids) + self.pos(batch.positions))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1 = nn.LayerNorm(c.dim, device="meta")
        self.norm2 = nn.LayerNorm(c.dim, device="meta")
        self.qkv = nn.Linear(c.dim, 3 * c.dim, device="meta")
        self.out = nn.Linear(c.dim, c.dim, device="meta")
        self.up = nn.Linear(c.dim, 4 * c.dim, device="meta")
        self.down = nn.Linear(4 * c.dim, c.dim, device="meta")
        self.head_size = c.dim // c.heads

    def attend(self, x):
        sequences, length, _ = x.shape
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = (t.transpose(1, 2).flatten(0, 1) for t in qkv.unbind(3))
        scores = torch.bmm(q, k.transpose(1, 2))
        shares = KeepAll.apply(torch.softmax(scores, -1))
        y = torch.bmm(shares, v).unflatten(0, (sequences, -1))
        return self.out(y.transpose(1, 2).reshape(sequences, length, -1))

    def forward(self, x, batch):
        x = x + KeepAll.apply(self.attend(self.norm1(x)))
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + KeepAll.apply(self.down(hidden))


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim, device="meta")
        self.proj = nn.Linear(c.dim, c.vocab, bias=False, device="meta")

    def forward(self, x):
        return self.proj(self.norm(x))


def blocks(c):
    """Embedding and head count as layers, so that a stage may hold one of them alone."""
    parts = [Tokens(c), *(Layer(c) for _ in range(c.layers)), Head(c)]
    return {f"layer{index}": part for index, part in enumerate(parts)}


def TIES(c):  # noqa: N802 - the name that a model file has
    return {f"layer{c.layers + 1}.proj.weight": "layer0.tok.weight"}


def AXES(c):  # noqa: N802 - the name that a model file has
    return {
        "*.bias": (None,),
        "*.norm*.weight": (None,),
        "*.tok.weight": ("vocab", None),
        "*.pos.weight": (None, None),
        "*.qkv.weight": (None, None),
        "*.out.weight": (None, None),
        "*.up.weight": (None, None),
        "*.down.weight": (None, None),
        "*.proj.weight": ("vocab", None),
    }
