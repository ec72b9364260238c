"""A model as users write one, with weft's public names only; `weft prove --sweep` proves it beside weft's own families."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft import Attend
from weft.models.common.batch import Batch


@dataclass(frozen=True)
class Config:
    """Sizes of the model."""

    layers: int = 2
    dim: int = 16
    heads: int = 4
    vocab: int = 256


def rotated(x_BSHK: Tensor, positions_BS: Tensor) -> Tensor:
    """Pairs of neighbouring entries turned by the angle of their position."""
    size = x_BSHK.shape[-1]
    even_places = torch.arange(0, size, 2, device=x_BSHK.device)
    exponents = even_places / size
    frequencies = 10_000.0**-exponents
    angles = positions_BS.unsqueeze(-1) * frequencies
    of_all_heads = angles.unsqueeze(2)
    cos = of_all_heads.cos().to(x_BSHK.dtype)
    sin = of_all_heads.sin().to(x_BSHK.dtype)
    pairs = x_BSHK.unflatten(-1, (-1, 2))
    even, odd = pairs.unbind(-1)
    turned_even = even * cos - odd * sin
    turned_odd = even * sin + odd * cos
    turned = torch.stack((turned_even, turned_odd), dim=-1)
    return turned.flatten(-2)


class UserLayer(nn.Module):
    """Attention and feed-forward part beside each other, behind one norm."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        dim = config.dim
        self.head_size = dim // config.heads
        self.norm = nn.LayerNorm(dim)
        self.q = nn.Linear(dim, dim, bias=False)
        self.k = nn.Linear(dim, dim, bias=False)
        self.v = nn.Linear(dim, dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.attend = Attend()

    def forward(self, x_BSD: Tensor, batch: Batch) -> Tensor:
        y_BSD = self.norm(x_BSD)
        q_BSHK = self._by_head(self.q(y_BSD))
        k_BSHK = self._by_head(self.k(y_BSD))
        v_BSHK = self._by_head(self.v(y_BSD))
        q_BSHK = rotated(q_BSHK, batch.positions)
        k_BSHK = rotated(k_BSHK, batch.positions)
        attended_BSHK = self.attend(q_BSHK, k_BSHK, v_BSHK, batch)
        attended_BSD: Tensor = self.out(attended_BSHK.flatten(2))
        hidden_BSF = F.gelu(self.up(y_BSD))
        mlp_BSD: Tensor = self.down(hidden_BSF)
        return x_BSD + attended_BSD + mlp_BSD

    def _by_head(self, x_BSD: Tensor) -> Tensor:
        x_BSHK: Tensor = x_BSD.unflatten(-1, (-1, self.head_size))
        return x_BSHK


def blocks(config: Config) -> dict[str, nn.Module]:
    """The chain of blocks."""
    chain: dict[str, nn.Module] = {}
    chain["embed"] = nn.Embedding(config.vocab, config.dim)
    for index in range(config.layers):
        chain[f"layer{index}"] = UserLayer(config)
    norm = nn.LayerNorm(config.dim)
    to_vocab = nn.Linear(config.dim, config.vocab)
    chain["head"] = nn.Sequential(norm, to_vocab)
    return chain


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.[qkv].weight": ("heads", "embed"),
    "layer*.out.weight": ("embed", "heads"),
    "layer*.up.weight": ("ffn", "embed"),
    "layer*.up.bias": ("ffn",),
    "layer*.down.weight": ("embed", "ffn"),
    "layer*.down.bias": ("embed",),
    "layer*.norm.*": ("norm",),
    "head.0.*": ("norm",),
    "head.1.weight": ("vocab", "embed"),
    "head.1.bias": ("vocab",),
}
