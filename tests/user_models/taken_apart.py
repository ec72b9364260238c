"""A user's model that takes tensors apart: positions one by one in a layer, log-probabilities by index in the loss."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from weft import Attend, Stacked


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 4
    vocab: int = 256


class Tokens(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok = nn.Embedding(c.vocab, c.dim)

    def forward(self, ids):
        return self.tok(ids)


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_size = c.dim // c.heads
        self.norm1, self.norm2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv, self.out = nn.Linear(c.dim, 3 * c.dim), nn.Linear(c.dim, c.dim)
        self.up, self.down = nn.Linear(c.dim, 4 * c.dim), nn.Linear(4 * c.dim, c.dim)
        self.attend = Attend()

    def forward(self, x, batch):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1, self.head_size)).unbind(2)
        x = x + self.out(self.attend(q, k, v, batch).flatten(-2))
        columns = [F.gelu(column) for column in self.up(self.norm2(x)).unbind(1)]
        return x + self.down(torch.stack(columns, 1))


class Loss(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm, self.proj = nn.LayerNorm(c.dim), nn.Linear(c.dim, c.vocab, bias=False)

    def forward(self, x, batch):
        logprobs = F.log_softmax(self.proj(self.norm(x)), -1).flatten(0, -2)
        targets = batch.targets.flatten()
        rows = torch.arange(len(targets), device=x.device)
        chosen = logprobs[rows, targets.clamp(min=0)]
        return -(chosen * (targets >= 0)).sum()


def blocks(c):
    return {"embed": Tokens(c), **{f"layer{i}": Layer(c) for i in range(c.layers)}, "loss": Loss(c)}


HEADS = Stacked(("heads", 4), ("heads", 4), ("heads", 4))
AXES = {
    "embed.tok.weight": (None, None),
    "*norm*": (None,),
    "*.qkv.weight": (HEADS, None),
    "*.qkv.bias": (HEADS,),
    "*.out.weight": (None, "heads"),
    "*.out.bias": (None,),
    "*.up.weight": ("ffn", None),
    "*.up.bias": ("ffn",),
    "*.down.weight": (None, "ffn"),
    "*.down.bias": (None,),
    "loss.proj.weight": (None, None),
}
