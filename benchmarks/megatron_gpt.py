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


def of_heads(x):
    """Sequences, length, heads, size -> (sequences heads), length, size."""
    return x.transpose(1, 2).flatten(0, 1)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        dim = c.dim
        self.norm1 = nn.LayerNorm(dim, device="meta")
        self.norm2 = nn.LayerNorm(dim, device="meta")
        self.qkv = nn.Linear(dim, 3 * dim, device="meta")
        self.out = nn.Linear(dim, dim, device="meta")
        self.up = nn.Linear(dim, 4 * dim, device="meta")
        self.down = nn.Linear(4 * dim, dim, device="meta")
        self.head_size = dim // c.heads

    def attend(self, x):
        sequences, length, _ = x.shape
        qkv = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))
        q, k, v = (of_heads(tensor) for tensor in qkv.unbind(3))
        scores = torch.bmm(q, k.transpose(1, 2))
        shares = torch.softmax(scores, -1)
        shares = KeepAll.apply(shares)
        y = torch.bmm(shares, v)
        y = y.unflatten(0, (sequences, -1)).transpose(1, 2)
        y = y.reshape(sequences, length, -1)
        return self.out(y)

    def forward(self, x, batch):
        attended = self.attend(self.norm1(x))
        x = x + KeepAll.apply(attended)
        hidden = self.up(self.norm2(x))
        down = self.down(F.gelu(hidden))
        return x + KeepAll.apply(down)


class Head(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm = nn.LayerNorm(c.dim, device="meta")
        self.proj = nn.Linear(
            c.dim,
            c.vocab,
            bias=False,
            device="meta",
        )

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
