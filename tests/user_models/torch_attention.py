"""torch.nn.MultiheadAttention inside a layer of its own, with a causal mask."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 4
    vocab: int = 256
    dropout: float = 0.1


class TorchAttentionLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1 = nn.LayerNorm(c.dim)
        self.n2 = nn.LayerNorm(c.dim)
        self.attn = nn.MultiheadAttention(c.dim, c.heads, c.dropout, batch_first=True)
        self.up = nn.Linear(c.dim, 32)
        self.down = nn.Linear(32, c.dim)

    def forward(self, x):
        y = self.n1(x)
        length = x.shape[1]
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        attended, _ = self.attn(y, y, y, attn_mask=hidden, need_weights=False)
        x = x + attended
        activated = F.gelu(self.up(self.n2(x)))
        return x + self.down(activated)


def blocks(c):
    chain = {"embed": nn.Embedding(c.vocab, c.dim)}
    for i in range(c.layers):
        chain[f"layer{i}"] = TorchAttentionLayer(c)
    chain["head"] = nn.Linear(c.dim, c.vocab)
    return chain


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.n[12].*": (None,),
    "layer*.attn.in_proj_weight": (None, "embed"),
    "layer*.attn.in_proj_bias": (None,),
    "layer*.attn.out_proj.weight": ("embed", None),
    "layer*.attn.out_proj.bias": ("embed",),
    "layer*.up.weight": ("ffn", "embed"),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
    "head.weight": ("vocab", "embed"),
    "head.bias": ("vocab",),
}
