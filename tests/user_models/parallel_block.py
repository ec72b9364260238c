"""GPT-J's way: attention and feed-forward layer read one norm and are added together; rotary positions in the block."""

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
    rates = 10_000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = (positions[..., None] * rates)[:, :, None].to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
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
        q, k, v = (
            f(y).unflatten(-1, (-1, self.size)) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, batch.positions), rotate(k, batch.positions)
        attended = self.out_proj(self.attend(q, k, v, batch).flatten(2))
        return x + attended + self.fc_out(F.gelu(self.fc_in(y)))


def blocks(c):
    layers = {f"layer{i}": ParallelLayer(c) for i in range(c.layers)}
    head = nn.Sequential(nn.LayerNorm(c.dim), nn.Linear(c.dim, c.vocab))
    return {"embed": nn.Embedding(c.vocab, c.dim), **layers, "head": head}


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
