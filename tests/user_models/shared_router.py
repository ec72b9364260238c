"""A mixture of experts whose router is shared by all layers; every expert computes every token, weighted by the router."""

from dataclasses import dataclass

import torch
from torch import nn

from weft import Attend


@dataclass(frozen=True)
class Config:
    layers: int = 2
    dim: int = 16
    heads: int = 4
    num_experts: int = 4
    hidden: int = 8
    vocab: int = 256


class Mixture(nn.Module):
    def __init__(self, c, router):
        super().__init__()
        self.router = router
        self.up = nn.Parameter(0.1 * torch.randn(c.num_experts, c.dim, c.hidden))
        self.down = nn.Parameter(0.1 * torch.randn(c.num_experts, c.hidden, c.dim))

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        top, _ = probs.topk(2, dim=-1)
        weights = probs.where(probs >= top[..., -1:], torch.zeros_like(probs))
        hidden = torch.einsum("bsd,edh->besh", x, self.up).relu()
        out = torch.einsum("besh,ehd->besd", hidden, self.down)
        return torch.einsum("besd,bse->bsd", out, weights)


class MixtureLayer(nn.Module):
    def __init__(self, c, router):
        super().__init__()
        self.n1 = nn.RMSNorm(c.dim)
        self.n2 = nn.RMSNorm(c.dim)
        self.q = nn.Linear(c.dim, c.dim, bias=False)
        self.k = nn.Linear(c.dim, c.dim, bias=False)
        self.v = nn.Linear(c.dim, c.dim, bias=False)
        self.o = nn.Linear(c.dim, c.dim, bias=False)
        self.attend = Attend()
        self.mixture = Mixture(c, router)
        self.size = c.dim // c.heads

    def forward(self, x, batch):
        y = self.n1(x)
        by_head = (-1, self.size)
        q = self.q(y).unflatten(-1, by_head)
        k = self.k(y).unflatten(-1, by_head)
        v = self.v(y).unflatten(-1, by_head)
        attended = self.attend(q, k, v, batch)
        x = x + self.o(attended.flatten(2))
        return x + self.mixture(self.n2(x))


def blocks(c):
    router = nn.Linear(c.dim, c.num_experts, bias=False)
    chain = {"embed": nn.Embedding(c.vocab, c.dim)}
    for i in range(c.layers):
        chain[f"layer{i}"] = MixtureLayer(c, router)
    chain["head"] = nn.Linear(c.dim, c.vocab)
    return chain


AXES = {
    "embed.weight": ("vocab", "embed"),
    "layer*.n[12].weight": (None,),
    "layer*.[qkv].weight": ("heads", "embed"),
    "layer*.o.weight": ("embed", "heads"),
    "layer*.mixture.router.weight": (None, "embed"),
    "layer*.mixture.up": (None, "embed", None),
    "layer*.mixture.down": (None, None, "embed"),
    "head.weight": ("vocab", "embed"),
    "head.bias": ("vocab",),
}
