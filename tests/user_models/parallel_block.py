"""A user's model as in GPT-J: attention and feed-forward layer read one norm and are summed; rotary positions in the block."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from weft import Attend


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 4
    vocab: int = 256


def rotate(x, positions):
    """Rotate pairs of neighbouring entries of x_BSHK."""
    size = x.shape[-1]
    exponents = torch.arange(0, size, 2, device=x.device) / size
    rates = 10_000.0 ** (-exponents)
    angles = positions[..., None] * rates
    angles = angles[:, :, None].to(x.dtype)
    cos = angles.cos()
    sin = angles.sin()
    even = x[..., ::2]
    odd = x[..., 1::2]
    turned_even = even * cos - odd * sin
    turned_odd = even * sin + odd * cos
    turned = (turned_even, turned_odd)
    return torch.stack(turned, dim=-1).flatten(-2)


class ParallelLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln = nn.LayerNorm(c.dim)
        self.q_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.k_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.v_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.out_proj = nn.Linear(c.dim, c.dim, bias=False)
        self.fc_in = nn.Linear(c.dim, 4 * c.dim)
        self.fc_out = nn.Linear(4 * c.dim, c.dim)
        self.attend = Attend()
        self.size = c.dim // c.heads

    def forward(self, x, batch):
        y = self.ln(x)
        by_head = (-1, self.size)
        q = self.q_proj(y).unflatten(-1, by_head)
        k = self.k_proj(y).unflatten(-1, by_head)
        v = self.v_proj(y).unflatten(-1, by_head)
        q = rotate(q, batch.positions)
        k = rotate(k, batch.positions)
        attended = self.attend(q, k, v, batch)
        hidden = F.gelu(self.fc_in(y))
        return x + self.out_proj(attended.flatten(2)) + self.fc_out(hidden)


def blocks(c):
    chain = {"embed": nn.Embedding(c.vocab, c.dim)}
    for i in range(c.layers):
        chain[f"layer{i}"] = ParallelLayer(c)
    head = nn.Linear(c.dim, c.vocab)
    chain["head"] = nn.Sequential(nn.LayerNorm(c.dim), head)
    return chain


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.[qkv]_proj.weight": ("heads", "embed"),
    "layer*.out_proj.weight": ("embed", "heads"),
    "layer*.fc_in.weight": ("ffn", "embed"),
    "layer*.fc_in.bias": ("ffn",),
    "layer*.fc_out.weight": ("embed", "ffn"),
    "layer*.fc_out.bias": ("embed",),
    "layer*.ln.*": ("norm",),
    "head.0.*": ("norm",),
    "head.1.weight": ("vocab", "embed"),
    "head.1.bias": ("vocab",),
}
