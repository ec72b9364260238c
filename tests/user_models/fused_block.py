"""A user's model as in nanoGPT: one weight for q, k and v, learned positions, a tied head without a bias."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import nn

from weft import Attend, Stacked


@dataclass(frozen=True)
class Config:
    n_layer: int = 2
    n_embd: int = 16
    n_head: int = 4
    vocab_size: int = 256
    block_size: int = 64


class CausalSelfAttention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c_attn = nn.Linear(c.n_embd, 3 * c.n_embd)
        self.c_proj = nn.Linear(c.n_embd, c.n_embd)
        self.attend = Attend()
        self.head_size = c.n_embd // c.n_head

    def forward(self, x, batch):
        fused = self.c_attn(x)
        by_head = (-1, self.head_size)
        q, k, v = (part.unflatten(-1, by_head) for part in fused.chunk(3, dim=-1))
        attended = self.attend(q, k, v, batch)
        return self.c_proj(attended.flatten(2))


class FeedForward(nn.Sequential):
    def __init__(self, c):
        super().__init__()
        self.c_fc = nn.Linear(c.n_embd, 4 * c.n_embd)
        self.c_proj = nn.Linear(4 * c.n_embd, c.n_embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x)))


class FusedLayer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_1 = nn.LayerNorm(c.n_embd)
        self.ln_2 = nn.LayerNorm(c.n_embd)
        self.attn = CausalSelfAttention(c)
        self.mlp = FeedForward(c)

    def forward(self, x, batch):
        x = x + self.attn(self.ln_1(x), batch)
        return x + self.mlp(self.ln_2(x))


class Tokens(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.wte = nn.Embedding(c.vocab_size, c.n_embd)
        self.wpe = nn.Embedding(c.block_size, c.n_embd)

    def forward(self, ids, batch):
        return self.wte(ids) + self.wpe(batch.positions)


class LanguageHead(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.ln_f = nn.LayerNorm(c.n_embd)
        self.lm_head = nn.Linear(c.n_embd, c.vocab_size, bias=False)

    def forward(self, x):
        return self.lm_head(self.ln_f(x))


def blocks(c):
    layers = {f"h{i}": FusedLayer(c) for i in range(c.n_layer)}
    return {"wte": Tokens(c), **layers, "lm": LanguageHead(c)}


def AXES(c):
    heads = ("heads", c.n_head)
    qkv = Stacked(heads, heads, heads)
    return {
        "wte.wte.weight": ("vocab", "embed"),
        "wte.wpe.weight": ("pos", "embed"),
        "*.ln_*": (None,),
        "h*.attn.c_attn.weight": (qkv, "embed"),
        "h*.attn.c_attn.bias": (qkv,),
        "h*.attn.c_proj.weight": ("embed", "heads"),
        "h*.mlp.c_fc.weight": ("ffn", "embed"),
        "h*.mlp.c_fc.bias": ("ffn",),
        "h*.mlp.c_proj.weight": ("embed", "ffn"),
        "h*.c_proj.bias": ("embed",),
    }


TIES = {"lm.lm_head.weight": "wte.wte.weight"}
